"""Natural text for reference models: documents become one stream of tokens."""

import numpy as np

from leank.data_gen import haystack
from scripts.reference_model.text import documents, main
from tests.helpers.text_tokenizers import tokenizer


def test_documents_become_a_stream_of_tokens(tmp_path, capsys, monkeypatch):
    sentences, words = haystack.sentences, tokenizer("reference")
    monkeypatch.setattr(haystack, "sentences", lambda essays, split: sentences(essays, split)[:600])
    words.save_pretrained(tmp_path / "tokenizer")
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:03d}.txt").write_text(f"Chapter {i}\n" + f"Sentence number {i} of the page. " * 20)
    train, test = (documents(folder, split) for split in ("train", "test"))
    assert [len(train), len(test)] == [40, 4]  # the shipped paragraphs, 500 sentences a document
    assert [text.split("\n")[0] for text in test[:2]] == ["Chapter 19", "Chapter 39"]
    assert not set(train) & set(test)
    main([str(folder), str(tmp_path / "tokenizer")])
    assert "test:" in capsys.readouterr().out
    whole, stream = (np.load(folder / f"{split}.npy") for split in ("train", "test"))
    assert stream.dtype == np.uint16
    assert (stream == words.eos_token_id).sum() == len(test)
    assert words.decode(stream[:30]).startswith("Chapter 19\nSentence")
    main([str(folder), str(tmp_path / "tokenizer"), "--every", "2"])
    parts = [np.split(ids, np.flatnonzero(ids == words.eos_token_id) + 1)[:-1] for ids in
             (whole, np.load(folder / "train.npy"))]  # fmt: skip
    assert [d.tolist() for d in parts[1]] == [d.tolist() for d in parts[0][::2]]
    assert np.array_equal(stream, np.load(folder / "test.npy"))
