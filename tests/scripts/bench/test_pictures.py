"""The README's picture: an SVG file that says what the tables say."""

from xml.etree import ElementTree

import pytest

from scripts.bench.pictures import main, spread


def texts(file):
    return [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_labels_move_apart_and_keep_their_order():
    moved = spread([7.1, 99.0, 7.9, 11.9], 6)
    assert moved[0] < moved[2] < moved[3] < moved[1]
    assert moved[2] - moved[0] >= 5.999
    assert moved[3] - moved[2] >= 5.999
    assert moved[1] == pytest.approx(99)


def test_recall_over_ratios(tmp_path):
    lines = ["label,ratio,recall,low,high", "dense,,98.8,98.6,99.0"]
    lines += [f"{label},{ratio},{recall},{recall - 1},{recall + 1}" for label, recall in (("LeanK", 98), ("new", 40))
              for ratio in (50, 70, 95, 97)]  # fmt: skip
    (tmp_path / "recall.csv").write_text("\n".join(lines))
    main(["recall", str(tmp_path / "recall.csv"), str(tmp_path / "recall.svg")])
    found = texts(tmp_path / "recall.svg")
    assert {"dense 98.8%", "LeanK 98.0%", "new 40.0%", "50", "97"} <= set(found)
    assert "95" not in found  # no room beside 97


def test_tables_of_two_models_have_a_panel_each(tmp_path):
    files = [tmp_path / name / "recall.csv" for name in ("one", "two")]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(f"label,ratio,recall,low,high\ndense,,{90 + number},80,95\nLeanK,70,{60 + number},50,70\n")
    main(["recall", *map(str, files), str(tmp_path / "recall.svg")])
    wanted = {"model=one", "model=two", "dense 90.0%", "dense 91.0%", "LeanK 60.0%", "LeanK 61.0%"}
    assert wanted <= set(texts(tmp_path / "recall.svg"))
