"""A made-up folder of LongProc in its official form: two samples of path traversal and countdown, one of each other."""

import json
import random
from itertools import pairwise

from leank.eval.metrics import searches

CITIES = ("Arden", "Bray", "Cove", "Dale", "Elm", "Fenn", "Glen", "Holt")
PROMPTS = {
    "html_to_tsv": "Page:\n{html_str}\n{task_topic}: {task_description}{filtering_instruction}\n{tsv_header}\n{{TSV}}",
    "path_traversal": "Cities:\n{city_context}\nFrom {src_city} to {dst_city}?",
    "tom_tracking": "Story:\n{story}\nQuestion: {question}",
    "countdown": "Examples:\n{demonstration}\nNumbers: {nums}\nTarget: {target}",
    "travel_planning": "Examples:\n{demonstration}\nTask:\n{problem}",
}
HTML = {"task_id": "W1_0.5k_1", "website_id": "W1", "html_path": "webpage/W1.html", "task_topic": "trees",
        "task_description": "(1) name; (2) height", "filtering_instruction": "", "tsv_header": "name\theight",
        "gt": "name\theight\nThe Oak\t30 m\nElm, a\t20 m\nYew\tN/A"}  # fmt: skip
TOM = {"story": "Step 0: Ada is in the hall; the cup is on the hall's shelf.\nStep 1: Ada moves to the den.",
       "question": "Where does Ada believe the cup is?", "solution": "Ada's belief on the cup:\n"
       "- Step 0: (initial state) {Ada location: hall; Ada's belief on cup: hall's shelf}\n"
       "- Step 1: (Ada location changed) {Ada location: den; Ada's belief on cup: hall's shelf}\n"
       "Final Answer: the hall's shelf"}  # fmt: skip
TRIP = {"num_cities": 3, "constraints": [
            {"type": "duration", "city": "Oslo", "num_days": 3}, {"type": "duration", "city": "Rome", "num_days": 2},
            {"type": "duration", "city": "Bern", "num_days": 4},
            {"type": "fixed", "city": "Bern", "start_day": 3, "end_day": 6}],
        "connected_cities": [["Oslo", "Bern"], ["Bern", "Rome"], ["Rome", "Oslo"]],
        "disambig_question_text": "Visit three cities.", "ground_truth_cities": "Oslo**Bern**Rome",
        "ground_truth_durations": "3**4**2", "estimated_output_tokens": 700, "ground_truth_plan":
        "Here is the plan:\n\n**Day 1-3:** Arriving in Oslo and visit Oslo for 3 days.\n"
        "**Day 3:** Fly from Oslo to Bern.\n**Day 3-6:** Visit Bern for 4 days.\n"
        "**Day 6:** Fly from Bern to Rome.\n**Day 6-7:** Visit Rome for 2 days."}  # fmt: skip


def path(seed):
    """A sample of path traversal: a way through the cities, in any order."""
    draw = random.Random(seed)
    order = draw.sample(CITIES, len(CITIES))
    ways = [(a, b, draw.choice(("bus", "ferry"))) for a, b in pairwise(order)]
    shown = [
        f"{a} is a lively city. You can travel from {a} to {b} by {by}." for a, b, by in draw.sample(ways, len(ways))
    ]
    route = "\n".join(f"From {a}, take a {by} to {b}." for a, b, by in ways)
    return {"context_nl": "\n".join(shown), "question_repr": [order[0], order[-1]], "answer_nl": route}


def countdown(seed):
    """A sample of countdown that its search solves."""
    draw = random.Random(seed)
    while True:
        sample = {"nums": [draw.randint(1, 49) for _ in range(4)], "target": draw.randint(10, 50)}
        try:
            searches.countdown(sample["nums"], sample["target"])
        except ValueError:
            continue
        return sample


def write(folder):
    """Write all files; returns the folder."""
    files = {"html_to_tsv/html_to_tsv_0.5k": [HTML], "tom_tracking/tom_tracking_0.5k": [TOM],
             "path_traversal/path_traversal_0.5k": [path(1), path(2)],
             "countdown/countdown_0.5k": [countdown(1), countdown(2)],
             "travel_planning/travel_planning_all": [TRIP, {**TRIP, "estimated_output_tokens": 3000}],
             "travel_planning/travel_planning_icl_examples": [TRIP]}  # fmt: skip
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(rows))
    for kind, prompt in PROMPTS.items():
        (folder / kind / "prompts.yaml").write_text(json.dumps({"USER_PROMPT": prompt}))  # JSON is YAML
    (folder / "html_to_tsv" / "webpage").mkdir()
    (folder / "html_to_tsv" / "webpage" / "W1.html").write_text("<li>Oak 30 m<li>Elm 20 m<li>Yew")
    return folder
