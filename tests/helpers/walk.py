"""Every causal decoder of the installed transformers as a tiny random model, and what works with it.

`make families` walks over all of them and writes docs/use/families.md. A family is made from its default config, shrunk
by the names of its settings.
"""

import functools
import itertools
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from leank.errors import in_one_line
from leank.eval.cache import CompressedLayer, compressed_cache
from leank.eval.cache.cache import FORGETFUL
from leank.eval.cache.hook import ATTENTION
from leank.shape import check_decoder, kv_shape
from leank.versions import CACHE
from leank_train.doctor import answers
from leank_train.forward.branching import PrefillPass
from leank_train.forward.hook import run_decoder
from tests.helpers import plain_form
from tests.helpers.cache_oracle import oracle_cache

SIZES = (4, 12, 4)  # sink, window, flush
PROMPT, STEPS, VOCAB = 70, 6, 61  # the prompt is longer than the sliding windows
SECONDS = 120  # that one family may take
KV_HEADS = "(key_value|kv|value|key)_heads|kv_n_heads"
AT_MOST = {  # the end of a setting's name, and the largest value that a tiny model has; the first that fits counts
    "token_id|token_index": 79,
    r"vocab_size\w*|group_vocab": 80,
    "mamba_d_head|mamba_head_?dim": 32,
    "num_kv_shared_layers|num_nextn_predict_layers|n_shared_experts|n_groups?|topk_group|first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "layers?": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    KV_HEADS: 2,
    "heads?": 4,
    r"hidden_size|adapter_\w+|d_model|n_embd|embed_dim|dim_model": 64,
    r"intermediate_size\w*|ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner": 48,
    "experts": 4,
    "experts_per_tok|top_k|moe_k": 2,
    "rank": 16,
    "max_position_embeddings|n_positions|n_ctx|max_seq_len": 512,
    "sliding_window|attention_chunk_size|attention_window|window_size": 64,
}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2}
BY_HAND = {  # where defaults make no model, or only one of its kinds of layers
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        **TWO_KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in TWO_KINDS["layer_types"]},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "mamba2": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"time_step_min": 1e-9},  # transformers clamps by it in a scan and not in a decoding step
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64,
        "indexer_compress_ratio": 8,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 64]},
    "xlnet": {"d_head": 16},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"hybrid_layer_ids": [1]},
}  # fmt: skip


def shrunk(name, value, kv_heads):
    """The value that a setting of a tiny model has."""
    if isinstance(value, list):
        return [shrunk(name, one, kv_heads) for one in value]
    if name in ("initializer_range", "init_std"):
        return 0.2  # attention is peaked enough that pruning matters
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    end = next((end for end in AT_MOST if re.search(f"(^|_)({end})$", name)), None)
    return value if end is None else min(value, kv_heads if end == KV_HEADS else AT_MOST[end])


def shrink(config, kv_heads):
    """Settings of a tiny model of the same kind, with one layer of each kind that the config names, at least two."""
    layers = config.get("num_hidden_layers") or 0
    by_layer = {k: v for k, v in config.items() if isinstance(v, list) and layers > 2 and len(v) == layers}
    own = {int(index): settings for index, settings in (config.get("per_layer_config") or {}).items()}
    kinds = {}
    for index in range(layers):
        kinds.setdefault(str([*(v[index] for v in by_layer.values()), own.get(index)]), index)
    chosen = sorted(kinds.values()) if len(kinds) > 1 else [0, 1]
    small = {}
    for name, value in config.items():
        if name == "per_layer_config" and own:
            small[name] = {at: shrink(own[i], kv_heads) for at, i in enumerate(chosen) if i in own}
        elif isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            small[name] = shrink(value, kv_heads)
        else:
            small[name] = shrunk(name, [value[i] for i in chosen] if name in by_layer else value, kv_heads)
    if len(kinds) > 1:
        small["num_hidden_layers"] = len(chosen)
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if width and heads and config.get("head_dim", 0) in (None, width // heads):
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]
    known = {"pad_token_id": 0, "bos_token_id": 1, "is_decoder": True}
    small |= {name: value for name, value in known.items() if name in small}
    small |= BY_HAND.get(config.get("model_type"), {})
    return {k: v for k, v in small.items() if k not in ("transformers_version", "architectures", "dtype")}


def tiny_config(kind, kv_heads=2):
    return CONFIG_MAPPING[kind](**shrink(CONFIG_MAPPING[kind]().to_dict(), kv_heads))


def build(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # some are made as zeros, which every head would share
            parameter.data.normal_(0, 2)
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def teach(model, cache, ids, mask=None, steps=STEPS, new=1):
    """Logits after the prompt and after every `new` of the `steps` tokens that are fed in, [1 + , B, vocabulary]."""
    cut, found = ids.shape[1] - steps, []
    position = (torch.ones_like(ids) if mask is None else mask).cumsum(-1).sub(1).clamp(min=0)
    for start, stop in [(0, cut), *((t, t + new) for t in range(cut, ids.shape[1], new))]:
        with torch.no_grad():
            out = model(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=position[:, start:stop],
                **{CACHE: cache},
            )
        found.append(out.logits[:, -1])
    return torch.stack(found)


def prompts(rows):
    ids = torch.randint(2, VOCAB, (rows, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1:, :30] = 0
    return ids, mask


def close(got, want):  # norms and the eager softmax of many models round to float32
    tolerance = 1e-5 if want.dtype == torch.float64 else 2e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def config_of(model):
    return model.config.get_text_config(decoder=True)


def dense(model):
    """Logits of eager attention, written in the model's own file, on transformers' own cache."""
    model.set_attn_implementation("eager")
    return teach(model, DynamicCache(config=config_of(model)), prompts(1)[0])


def check_nothing_pruned(model, want):
    """A cache that keeps everything gives the dense logits, and so do other caches after the switch."""
    ids, _ = prompts(1)
    close(teach(model, compressed_cache(model, None, *SIZES), ids), want)
    close(teach(model, DynamicCache(config=config_of(model)), ids), want)


def check_a_mask(model):
    """A random mask gives the logits of the oracle, on a padded batch."""
    ids, mask = prompts(2)
    shape = kv_shape(config_of(model))
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    keep[:, 0] &= torch.arange(shape[2]) < 3
    cache, oracle = compressed_cache(model, keep, *SIZES), oracle_cache(keep, *SIZES)
    for index, layer in enumerate(DynamicCache(config=config_of(model)).layers):
        if not isinstance(cache.layers[index], CompressedLayer):
            oracle.layers[index] = layer
    got = teach(model, cache, ids, mask)
    model.set_attn_implementation("oracle")
    close(got, teach(model, oracle, ids, mask))
    model.set_attn_implementation(ATTENTION)
    whole = teach(model, compressed_cache(model, None, *SIZES), ids, mask)
    if any(isinstance(layer, CompressedLayer) for layer in cache.layers):
        assert (got - whole)[1:].abs().max() > 1e-4, "the mask does not matter"


def check_a_turn(model):
    """Tokens that come at once give what they give one by one, or are refused."""
    ids, _ = prompts(1)
    singly = teach(model, compressed_cache(model, None, *SIZES), ids)
    try:
        at_once = teach(model, compressed_cache(model, None, *SIZES), ids, new=STEPS)
    except ValueError:
        assert config_of(model).model_type in FORGETFUL
    else:
        close(at_once[-1], singly[-1])


def check_generate(model):
    """generate() and its bookkeeping, on a left-padded batch, with nothing pruned."""
    ids, mask = prompts(2)
    options = {"attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, **{CACHE: compressed_cache(model, None, *SIZES)}, **options)
    assert torch.equal(got, model.generate(ids, **{CACHE: DynamicCache(config=config_of(model))}, **options))


def hidden_in_training(model, ids):
    check_decoder(model)
    with torch.no_grad():
        return run_decoder(model, ids, torch.arange(ids.shape[1])[None], PrefillPass(ids.shape[1], 2))


def check_hidden_states(model):
    """Shorter than its sliding windows a pass of training has the hidden states of eager attention."""
    check_decoder(model)
    ids = prompts(1)[0][:, :20]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.base_model(ids).last_hidden_state
    close(hidden_in_training(model, ids), want)


class Found(NamedTuple):
    """What works with a family: "yes", or the line that says why not; "" = not asked."""

    cache: str
    training: str = ""


@contextmanager
def at_most(seconds):
    def late(*_):
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def said(error):
    """An error of another library in its first sentence."""
    line = f"{type(error).__name__}: {in_one_line(str(error))}"
    return re.sub(r"^.*validate_\w+':\s*|\. .*", "", line)[:200]


def outcome(*checks):
    """ "yes", the line with which leank refuses, or what went wrong."""
    try:
        for check in checks:
            check()
    except Exception as error:
        ours = "site-packages" not in traceback.extract_tb(error.__traceback__)[-1].filename
        refused = ours and type(error) is ValueError and "\n" not in str(error)
        return str(error) if refused else f"FAILS: {said(error)}"
    return "yes"


def tiny(kind):
    """(config, a model, its dense logits or why there are none); some families have no float64, others no GQA."""
    found, reasons = (None, None), []
    for dtype, kv_heads in itertools.product((torch.float64, torch.float32), (2, 4)):
        try:
            config = tiny_config(kind, kv_heads)
            found = config, build(config, dtype)
            logits = dense(found[1])
            assert logits.isfinite().all(), "logits are not finite"
            return *found, logits
        except TimeoutError:
            raise
        except Exception as error:
            reasons.append(said(error))
    return *found, reasons[-1]


@functools.cache
def walk(kind):
    """What works with a family. The doctor must say the same of it."""
    try:
        with at_most(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _walk(kind)
    except Exception as error:
        return Found(f"FAILS: {said(error)}")


def _walk(kind):
    config, model, want = tiny(kind)
    if model is None:
        return Found(f"not built: {want}")
    cache = outcome(lambda: compressed_cache(model, None))
    if cache == "yes" and isinstance(want, str):
        return Found(f"not built: {want}")
    if cache == "yes":
        checks = [(check_nothing_pruned, model, want)]
        checks += [(check, model) for check in (check_a_mask, check_a_turn, check_generate)]
        cache = outcome(*(functools.partial(*check) for check in checks))
    training = ""
    if cache == "yes":
        checks = [check_hidden_states, *[plain_form.compare] * (want.dtype == torch.float64)]
        training = outcome(*(functools.partial(check, model) for check in checks))
    found = Found(cache, training)
    with torch.device("meta"):
        doctor = dict(answers(AutoModelForCausalLM.from_config(config)))
    for question, answer in found._asdict().items():
        if answer and doctor[question].split(";")[0].removeprefix("no: ") != in_one_line(answer).split(";")[0]:
            return Found(f"FAILS: {question} is {answer!r}, and the doctor says {doctor[question]!r}")
    return found


PARTS = ("Works, and a mask can be trained", "Works, training is refused", "Refused", "Not tried", "Fails")


def part(found):
    """The heading under which the page has a family."""
    if found.cache == "yes":
        fails = found.training.startswith("FAILS:")
        return PARTS[4] if fails else PARTS[0] if found.training == "yes" else PARTS[1]
    return PARTS[4 if found.cache.startswith("FAILS:") else 3 if found.cache.startswith("not built:") else 2]


def reason(found):
    """Why not, without the names and numbers of one family."""
    answers = [answer for answer in found if answer != "yes"]  # the second is "" if the first is a reason
    line = answers[0].removeprefix("not built: ") if answers else ""
    line = re.sub(r"^model=\S+?:? |; .*|: choose.*| of \w+(?= uses)", "", line)
    return re.sub(r"\b\d+\b", "n", line) if "Error: " not in line else line


def page():
    """docs/use/families.md below its mark: the counts, then the families by what works."""
    parts = {name: defaultdict(list) for name in PARTS}
    for kind in sorted(CLASSES):
        parts[part(found := walk(kind))][reason(found)].append(kind)
    trained, cached, refused, untried, failed = (sum(map(len, by_reason.values())) for by_reason in parts.values())
    lines = [
        f"Of {len(CLASSES)} causal decoders of transformers {transformers.__version__}, {trained + cached} run, "
        f"{trained} of them can be trained too, {refused} are refused by name, {failed} fail, and {untried} were not "
        "tried."
    ]
    for name, by_reason in parts.items():
        if name == PARTS[0]:  # no reasons
            names = ", ".join(kind for kinds in by_reason.values() for kind in kinds)
            lines += [f"## {name}", textwrap.fill(names, 160, break_on_hyphens=False)]
        elif by_reason:
            table = [(why, ", ".join(kinds)) for why, kinds in sorted(by_reason.items())]
            lines += [f"## {name}", pd.DataFrame(table, columns=["why", "families"]).to_markdown(index=False)]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    before, mark, _ = file.read_text(encoding="utf-8").partition("<!-- made by make families -->\n")
    file.write_text(before + mark + "\n" + page(), encoding="utf-8")
    sys.exit(any(part(walk(kind)) == PARTS[4] for kind in CLASSES))
