"""Replaying recorded sequences: the same steps, acceptance and tokens as an engine would have had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.config import FirstConfig, NgramConfig, NoSpeculation, PredictionConfig, SuffixConfig
from draft.tree import Draft
from speculation.recording import Recording, read_log
from speculation.simulate import Simulator, follow, main, parse_config, parse_curve, simulate

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
FLAT = "1:5,64:5"


def still() -> float:
    """A clock for which drafting takes no time."""
    return 0.0


def test_an_accepted_path_is_the_longest_the_target_takes() -> None:
    """From the root, at each node the child that is the next token, to where there is none."""
    draft = Draft((5, 6, 7, 8, 9), (-1, -1, 1, 1, 3), "suffix")
    assert follow(draft, [6, 8, 9, 1]) == (1, 3, 4)
    assert follow(draft, [5, 8]) == (0,)
    assert follow(draft, [9]) == ()


def test_steps_and_acceptance_are_counted() -> None:
    """A text that repeats is copied k tokens a step: every number of the replay follows from that."""
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    recording = Recording(prompt_token_ids=text[:16], output_token_ids=text[16:])
    config = NgramConfig(num_speculative_tokens=3)
    replay = Simulator(parse_curve("1:4,4:8"), clock=still).run([recording], config)
    # The prompt's own step yields the first of 24 tokens; 23 are left: 5 steps of 3 + 1, then one of 2 + 1.
    assert (replay.num_steps, replay.num_drafts, replay.num_draft_tokens) == (6, 6, 17)
    assert replay.mean_acceptance_length == pytest.approx(23 / 6)
    assert (replay.acceptance_rate, replay.acceptance_at(3)) == (1.0, 1.0)
    assert (replay.drafted_per_position[3], replay.acceptance_at(4)) == (5, 0.0)
    assert replay.seconds == pytest.approx((5 * 8 + 4 + 4 / 3 * 2) / 1000, rel=0.02)


@settings(deadline=None)
@given(
    outputs=st.lists(TOKENS, max_size=5),
    config=st.sampled_from(
        [
            NoSpeculation(),
            NgramConfig(),
            SuffixConfig(num_speculative_tokens=4, tree_size=9),
            FirstConfig(proposers=(PredictionConfig(), SuffixConfig())),
        ]
    ),
    num_concurrent=st.integers(1, 3),
)
def test_every_config_replays_every_token(
    outputs: list[list[int]], config: NoSpeculation | NgramConfig | SuffixConfig | FirstConfig, num_concurrent: int
) -> None:
    """Tokens are those of the log, steps and accepted tokens add up to them, and drafts plus reasons to the steps."""
    recordings = [Recording(prompt_token_ids=[1, 2], output_token_ids=output) for output in outputs]
    replay = Simulator(parse_curve(FLAT), num_concurrent=num_concurrent).run(recordings, config)
    assert replay.num_tokens == sum(map(len, outputs))
    assert replay.num_steps + replay.num_accepted == replay.num_tokens - len(outputs)
    assert replay.num_drafts + replay.skipped.total() == replay.num_steps
    assert "" not in replay.skipped


def test_a_prediction_in_the_log_is_followed() -> None:
    """A recorded request's predicted output is consulted before the config's own proposer."""
    output = list(range(50, 90))
    recording = Recording(prompt_token_ids=[1], output_token_ids=output, prediction_token_ids=output)
    replay = simulate([recording], {"k4": NgramConfig(num_speculative_tokens=4)}, FLAT)["k4"]
    assert replay.tokens_per_step > 5


def test_the_command_prints_a_row_a_config_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain decoding and each config are compared, with acceptance by position and the reasons of skipped drafts."""
    log = tmp_path / "log.jsonl"
    line = {"prompt_token_ids": [1, 2, 3], "output_token_ids": [1, 2, 3, 1, 2, 3, 1, 2, 3], "category": "x"}
    log.write_text(json.dumps(line) + "\n\n" + json.dumps(line) + "\n")
    fixed = '{"method": "ngram", "num_speculative_tokens": 2}'
    out = tmp_path / "out.json"
    assert main(["--log", str(log), "--config", "suffix", "--config", fixed, "--json", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["config", "none", "suffix"]
    rows = {row["config"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows[fixed]["acceptance_per_position"] == [1.0, 1.0]
    assert (rows["none"]["steps"], rows["none"]["speedup"], rows[fixed]["steps"]) == (16, 1.0, 6)
    assert rows["none"]["skipped_drafts"] == {"disabled": 14, "last_token": 2}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config", "eagle3"], "method 'eagle3' needs a model and cannot be simulated; one of prediction"),
        (["--config", "lookup"], "method 'lookup' is unknown; one of prediction, suffix, ngram, first, auto, none"),
        (["--config", '{"method": "ngram", "k": 2}'], "unknown field `k`"),
        (["--config", '{"method": '], "config '{\"method\": '"),
        (["--config", "ngram", "--cost-curve", "1:4,x"], "cost curve has 'x'"),
        (["--config", "ngram", "--cost-curve", "0:4"], "must be positive"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config that needs a model or is no config, and a curve that is none, end with a sentence and status 2."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_token_ids": [1], "output_token_ids": [1, 2]}\n')
    assert main(["--log", str(log), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """A line that is no recording is reported with its number and what a line looks like."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_token_ids": [1], "output_token_ids": [1]}\n{"prompt_token_ids": "x"}\n')
    with pytest.raises(ValueError, match=r"log.jsonl, line 2: .*prompt_token_ids.*a line is"):
        list(read_log(log))


def test_a_log_in_use_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    """Half a line at the end is being written by the service and left out; a whole one without a newline is read."""
    log = tmp_path / "log.jsonl"
    whole = '{"prompt_token_ids": [1], "output_token_ids": [1]}'
    log.write_text(f"{whole}\n{whole[:30]}")
    assert list(read_log(log)) == [Recording(prompt_token_ids=[1], output_token_ids=[1])]
    log.write_text(f"{whole}\n{whole}")
    assert len(list(read_log(log))) == 2


def test_auto_is_the_best_lookup() -> None:
    """Without models "auto" becomes suffix decoding."""
    assert parse_config("auto") == FirstConfig(proposers=(SuffixConfig(),))


def test_the_table_prints_eight_positions_in_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Acceptance stands in one column a position, at most eight, and steps without a draft are counted by reason."""
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt_token_ids": text[:16], "output_token_ids": text[16:]}) + "\n")
    config = '{"method": "ngram", "num_speculative_tokens": 12}'
    assert main(["--log", str(log), "--config", config]) == 0
    printed = capsys.readouterr().out
    assert not {"[", "]"} & set(printed.replace(config, ""))
    lines = printed.splitlines()
    heading = next(line for line in lines if line.startswith("acceptance by position"))
    assert heading.split()[3:] == [str(position) for position in range(1, 9)]
    rates = lines[lines.index(heading) + 2].removeprefix(config).split()
    assert len(rates) == 8
    assert set(rates) <= {"1.00", "0.00"}
    assert "none: steps without a draft: " in printed
