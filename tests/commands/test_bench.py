"""`paceline bench` as a user meets it, on models small enough for a CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.commands.bench import StepArgs, train_words
from paceline.commands.train import base_config, parse_on_preset
from paceline.commands.train import parse_arguments as parse_train
from paceline.lab.bench.classes import CLASSES
from train.tiny import write_text_shards

TINY = {
    "--steps": 12,
    "--model.vocab-size": 257,
    "--model.width": 32,
    "--model.num-layers": 2,
    "--model.num-heads": 2,
    "--model.head-dim": 16,
    "--data.tokenizer": "bytes",
    "--data.end-of-text": 256,
    "--batch.sequence-tokens": 256,
    "--batch.tokens": 512,
    "--batch.micro-tokens": 256,
}
PROVENANCE = {"what", "hardware", "versions", "date", "commit", "dirty", "command", "diff", "preset", "scale"}


def words(folder: Path) -> list[str]:
    """Flags of a tiny run on data in `folder`."""
    write_text_shards(folder)
    return [str(word) for flag in (TINY | {"--data.dir": folder}).items() for word in flag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a whole `bench step` has left its result and its trace."""
    folder = tmp_path_factory.mktemp("bench")
    flags = [
        "--points",
        "2",
        "--repeats",
        "2",
        "--out",
        str(folder / "step.json"),
        "--trace",
        str(folder / "t.json.gz"),
    ]
    assert main(["bench", "step", "demo", *words(folder / "data"), *flags]) == 0
    return folder


@pytest.fixture
def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "step.json").read_text())
    return found


def test_a_step_is_measured_with_all_that_a_reader_needs(result: dict[str, Any]) -> None:
    figures = {"step_s", "tokens_per_s", "mfu", "peak_gib", "cold_start_s", "warm_start_s", "shares", "windows",
               "floor_s", "peak_tflops", "kernels", "profiled_step_s", "sm_clock_mhz", "power_w", "micro_tokens",
               "peak_gib_as_timed", "notes", "ranks", "exposed_communication_s", "communication_share"}  # fmt: skip
    assert result.keys() == figures | PROVENANCE
    assert result["tokens_per_s"] == pytest.approx(512 / result["step_s"])
    assert result["mfu"] == pytest.approx(result["floor_s"] / result["step_s"])
    assert 0 < result["mfu"] < 1
    assert 0 < result["step_s"] < result["warm_start_s"]
    assert 0 < result["step_s"] < result["cold_start_s"]
    assert result["sm_clock_mhz"] is None
    assert (result["ranks"], result["exposed_communication_s"], result["communication_share"]) == (1, None, None)
    assert {change["field"]: change["after"] for change in result["diff"]}["model.width"] == 32
    assert result["command"].startswith("paceline bench step demo --steps 12")


def test_the_mean_step_lies_between_those_of_its_windows(result: dict[str, Any]) -> None:
    rows = result["windows"]
    assert [row["tokens"] for row in rows] == sorted({row["tokens"] for row in rows})
    assert len(rows) == 2
    assert sum(row["steps"] for row in rows) == 12
    assert min(row["seconds"] for row in rows) <= result["step_s"] <= max(row["seconds"] for row in rows)


def test_shares_are_of_the_whole_and_every_part_of_the_step_has_one(result: dict[str, Any]) -> None:
    shares = result["shares"]
    assert list(shares) == list(CLASSES)
    assert sum(shares.values()) == pytest.approx(1)
    for part in ("head_and_loss", "mlp", "attention_projections", "attention", "norms_and_mixes", "optimizer", "data"):
        assert shares[part] > 0, part
    assert len(result["kernels"]) == 25
    seconds = [row["seconds"] for row in result["kernels"]]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trace_is_kept_compressed(folder: Path) -> None:
    with gzip.open(folder / "t.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert names >= {"paceline: steps", "paceline: data", "paceline: optimizer", "aten::mm"}


@pytest.mark.gpu
def test_on_a_gpu_the_kernels_of_compiled_code_have_their_classes(tmp_path: Path) -> None:
    flags = ["--train.device", "cuda", "--train.compile", "--no-start", "--points", "1"]
    assert main(["bench", "step", "demo", *words(tmp_path), *flags, "--out", str(tmp_path / "step.json")]) == 0
    result = json.loads((tmp_path / "step.json").read_text())
    assert sum(result["shares"].values()) == pytest.approx(1)
    for part in ("head_and_loss", "mlp", "attention_projections", "attention", "norms_and_mixes", "optimizer", "data"):
        assert result["shares"][part] > 0, part
    assert any(row["name"].startswith("triton_") for row in result["kernels"])
    assert result["peak_gib"] > 0
    assert result["sm_clock_mhz"] > 0


def test_only_the_profile_and_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "demo", *words(tmp_path), "--no-times", "--no-start"]) == 0
    said = capsys.readouterr().out
    assert "where a profiled step goes" in said
    assert "aten::mm" in said
    assert "step by window" not in said


def test_a_result_is_printed_where_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gemm", "demo", "--scale", "1/16", "--repeats", "1", "--json", "--out", str(tmp_path)]) == 1
    out, error = capsys.readouterr()
    assert json.loads(out)["preset"] == "demo"
    assert error == f"paceline: {tmp_path}: cannot be read or written (Is a directory)\n"


def test_products_are_timed_in_the_shapes_of_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gemm.json"
    flags = ["--scale", "1/16", "--repeats", "2", "--json", "--out", str(out)]
    assert main(["bench", "gemm", "r18-softcap", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(out.read_text())
    assert result.keys() == {"gemm_s", "gemm_tflops", "floor_s", "peak_tflops", "products"} | PROVENANCE
    assert result["gemm_s"] == pytest.approx(sum(row["step_s"] for row in result["products"]))
    assert {tuple(row["shape"]) for row in result["products"] if row["name"] == "mlp up"} == {
        (2048, 96, 384),
        (2048, 384, 96),
        (384, 2048, 96),
    }


def test_products_in_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gemm", "demo", *words(tmp_path), "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert "grad weight" in said
    assert "TFLOP/s" in said


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("r18-softcap", "--scale", "1/16"),
        ("r17-sparse-values", "--steps", "95", "--seed", "3"),
        ("r18-softcap", "--model.softcap", "None", "--model.no-x0-mix", "--train.recompute"),
        ("r18-softcap", "--model.layers-without-attention", "1", "-1", "--data.dir", "a b"),
    ],
)
def test_the_start_is_measured_with_the_config_of_the_steps(flags: tuple[str, ...]) -> None:
    base = base_config(flags)
    arguments = parse_on_preset(StepArgs, flags, base, verb="bench step", description="")
    found = train_words(arguments, base)
    assert parse_train(found, base_config(found)).config == arguments.config


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("step", "demmo"), "preset 'demmo' does not exist; did you mean demo?"),
        (("gemm", "demmo"), "preset 'demmo' does not exist; did you mean demo?"),
        (("step", "demo", "--points", "0"), "--points 0 must be at least 1"),
        (("step", "demo", "--repeats", "0"), "--repeats 0 must be at least 1"),
        (("gemm", "demo", "--repeats", "-1"), "--repeats -1 must be at least 1"),
        (("step", "demo", "--no-profile", "--trace", "t.json"), "--trace t.json needs the profile"),
        (("step", "--points", "2", "r18-softcap"), "goes first: paceline bench step r18-softcap"),
        (("step", "demo", "--pionts", "2"), "did you mean --points?"),
        (("step", "demo", "--no-start", "--data.dir", "nowhere"), "nowhere"),
        (("step", "demo", "--steps", "9"), "--steps 9: a start is measured over 10"),
        (("stp",), "'bench' needs one of step, gemm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_costs_one_line(argv: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("measuring: ")]
    assert len(lines) == 1
    assert said in lines[0]


def test_writing_is_measured_for_one_text_and_for_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sample.json"
    flags = ["--scale", "1/16", "--streams", "1", "3", "--steps", "4", "--repeats", "2", "--out", str(out)]
    assert main(["bench", "sample", "r18-softcap", *flags]) == 0
    assert "texts at once" in capsys.readouterr().out
    result = json.loads(out.read_text())
    figures = {"model", "scale", "step", "threads", "load_before", "settings", "streams"}
    assert result.keys() == figures | PROVENANCE - {"preset"}
    assert [row["streams"] for row in result["streams"]] == [1, 3]
    for row in result["streams"]:
        assert 0 < row["lowest_tokens_per_s"] <= row["tokens_per_s"] <= row["highest_tokens_per_s"]
        assert row["first_token_s"] > 1 / row["highest_tokens_per_s"] / row["streams"]
        assert row["kernels_per_step"] is None


def test_a_trained_run_is_measured_too(tmp_path: Path) -> None:
    run, out = Path(__file__).parents[1] / "frozen" / "format-2", tmp_path / "sample.json"
    flags = ["--streams", "2", "--steps", "3", "--repeats", "1", "--prompt-tokens", "4", "--out", str(out)]
    assert main(["bench", "sample", str(run), *flags]) == 0
    assert json.loads(out.read_text())["streams"][0]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--streams", "0"], "--streams 0"),
        (["--steps", "0"], "--steps 0"),
        (["--prompt-tokens", "5000"], "--prompt-tokens 5,000"),
    ],
)
def test_a_mistaken_measurement_of_writing_is_one_line(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "sample", "demo", *flags]) == 2
    assert named in capsys.readouterr().err
