"""A valid line of every benchmark that is read from files, and the configuration of a model of any length."""

import json
from dataclasses import asdict
from types import SimpleNamespace

from leank.data_gen.gsm.infinite import realistic
from leank.data_gen.gsm.symbolic import symbolic
from tests.helpers import parity

CONFIG = SimpleNamespace(max_position_embeddings=None)

QASPER = {"context": "A text.", "input": "Who?", "answers": ["Ada", "Ada L."], "all_classes": None, "length": 3,
          "dataset": "qasper", "_id": "x1"}  # fmt: skip
TREC = {**QASPER, "dataset": "trec", "answers": ["Person"], "all_classes": ["Person", "Place"]}
PASSKEY = {"context": "A text.", "input": "The key?", "answer": ["71432"], "options": [], "id": 0}
CHOICE = {"context": "A text.", "input": "Who?", "answer": ["Ada"], "options": ["Bo", "Ada", "Cy", "Di"], "id": 0}
FIND = {"context": "[1, 17]", "input": "The second largest number of the list is:", "answer": [17], "id": 0}
MATH = {"problem": "What is $2+3$?", "answer": "5", "unique_id": "a/1", "subject": "Algebra", "level": 1}
SUM = asdict(realistic(2, 2, "crazy_zootopia", "normalforward", 0, 0))
NAMES = {**asdict(symbolic(2, 0, 0)), "answer_list": list(symbolic(2, 0, 0).answer_list)}
MMLU = {"split": "test", "subject": "anatomy", "question": "Which?", "choices": ["a", "b", "c", "d"], "answer": "B"}
V2 = {"context": "A text.", "question": "Which?", **{f"choice_{letter}": letter.lower() for letter in "ABCD"},
      "answer": "B", "difficulty": "easy", "length": "short", "domain": "Code", "_id": "x1"}  # fmt: skip
BABI = {"input": "A tale. John took the milk. John went to the office.", "question": "Where is the milk? ",
        "target": "office"}  # fmt: skip
NEEDLE = {"id": "0001", "needle": "{CHAR} keeps a {1}.", "questions": {"onehop": "Who has a {2}?"}, "tests":
          {"T1": {"input_args": ["trout", "fish"]}}, "character_set": ["Ada", "Bo", "Cy"], "system_prompt": "Be brief.",
          "task_template": "Read:\n{haystack}\nQuestion: {question}"}  # fmt: skip

AIME = {"problem": "How many?", "answer": "073", "id": 60}
GPQA = {"Question": "Which?", "Correct Answer": "a", "Incorrect Answer 1": "b", "Incorrect Answer 2": "c",
        "Incorrect Answer 3": "d", "Subdomain": "Optics"}  # fmt: skip
CHAT = [{"role": "user", "content": "write a poem about tapirs"}, {"role": "assistant", "content": "A tapir sat."},
        {"role": "user", "content": "Prepend x7Qp to the 1st (1 indexed) poem about tapirs."}]  # fmt: skip
MRCR = {"prompt": json.dumps(CHAT), "answer": "x7QpA tapir sat.", "random_string_to_prepend": "x7Qp", "n_needles": 2}
GSM8K = {"question": "How many?", "answer": "2 + 3 = 5\n#### 5"}


def helmet_files(folder):
    """Made-up files of HELMET, one or two lines each, beside the examples that its parity rows were made with."""
    examples, *rows = parity.rows("helmet")
    found = {"kilt/nq-train-multikilt_1000_k3_dep6": examples["demos"], "icl/trec_coarse_train": examples["train"],
             "kilt/popqa_test_1000_k3_dep6": examples["demos"]}  # fmt: skip
    names = {"nq_8k": "kilt/nq-dev-multikilt_1000_k50_dep6", "popqa_8k": "kilt/popqa_test_1000_k50_dep6",
             "json_kv_8k": "json_kv/test_k105_dep6", "trec_coarse_8k": "icl/trec_coarse_test"}  # fmt: skip
    for row in rows:
        if "line" in row:
            found.setdefault(names[row["task"]], []).append(row["line"])
    for name, lines in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
