"""Write `gsm8k.json`: what lm_eval's gsm8k task extracts from texts, and how it scores them.

python tests/golden/make_gsm8k.py with lm_eval 0.4.13, PyYAML and numpy; its own filters, metric and task file are run.
"""

import json
from pathlib import Path

import lm_eval
import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

ANSWER = "She sells 2,125 - 4 of them.\n#### 2,125"
TEXTS = [
    "So it is 2,125.\n#### 2,125",
    "#### 2125",
    "#### 7\n\nwait, #### 2125",
    "#### 2125.",
    "#### 2125.00",
    "#### $2,125",
    "####2125",
    "#### -2125",
    "The answer is $2,125.",
    "The answer is 2125",
    "The answer is 2125 dollars and 7 cents",
    "It costs $ 2125...",
    "2125\n\nThat is all...",
    "2125 , then .. and $$",
    "The answer is \\boxed{2125}.",
    "1-2125",
    "",
    "No number.",
    "####",
    "#### ,",
    "#### [invalid]",
    "#### 2125\nQuestion: 7",
]


def main() -> None:
    task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    metric = {k: v for k, v in task["metric_list"][0].items() if k in ("ignore_case", "ignore_punctuation")}
    ignored = task["metric_list"][0]["regexes_to_ignore"]
    filters = {}
    for each in task["filter_list"]:
        options = {k: v for k, v in each["filter"][0].items() if k != "function"}
        filters[each["name"].partition("-")[0]] = RegexFilter(**options)
    items = []
    for text in TEXTS:
        item = {"text": text}
        for name, regex in filters.items():
            found = regex.apply([[text]], [{}])[0][0]
            score = exact_match_hf_evaluate([found], [ANSWER], regexes_to_ignore=ignored, **metric)
            item[name] = [found, bool(score["exact_match"])]
        items.append(item)
    out = Path(__file__).with_name("gsm8k.json")
    out.write_text(json.dumps({"answer": ANSWER, "items": items}, indent=1) + "\n")


main()
