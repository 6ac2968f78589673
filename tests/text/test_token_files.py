"""Token ids of others become shards whose ids are theirs; what cannot is refused with the command that can."""

import pickle
import shlex
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.commands import data
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.data.shards import HEADER_WORDS, MAGIC, open_shard, positions_of
from paceline.text import token_files
from paceline.text.config import PrepareConfig
from paceline.text.dataset import open_corpus
from paceline.text.manifest import DatasetManifest
from paceline.text.prepare import prepare
from paceline.text.token_files import WIDE_MAGIC, is_validation
from paceline.text.tokenizer import GPT2_FINGERPRINT
from paceline.text.verify import verify

END = 256
"""Of the tokenizer `bytes`."""
DOCUMENTS = [list(b"first document"), list(b"second"), list(b"third one")]
CLOSED = [token for ids in DOCUMENTS for token in (*ids, END)]
OPENED = [token for ids in DOCUMENTS for token in (END, *ids)]


def llm_c(ids: list[int], magic: int, version: int, dtype: str) -> bytes:
    header = np.zeros(HEADER_WORDS, "<i4")
    header[:3] = magic, version, len(ids)
    return header.tobytes() + np.array(ids, dtype).tobytes()


def write(path: Path, ids: list[int], form: str = "nanogpt") -> Path:
    match form:
        case "nanogpt":
            path.write_bytes(np.array(ids, "<u2").tobytes())
        case "llm.c":
            path.write_bytes(llm_c(ids, MAGIC, 1, "<u2"))
        case "llm.c 7":
            path.write_bytes(llm_c(ids, WIDE_MAGIC, 7, "<u4"))
        case _:
            path = path.with_suffix(".npy")
            np.save(path, np.array(ids, form))
    return path


def prepared(out: Path, *inputs: Path, **options: object) -> DatasetManifest:
    given = {"inputs": tuple(map(str, inputs)), "out": str(out), "ids_of": "bytes"} | options
    return prepare(PrepareConfig(**given))  # type: ignore[arg-type]


def side_of(out: Path, side: str) -> list[int]:
    return [token for path in sorted(out.glob(f"*_{side}_*.bin")) for token in open_shard(path).tokens.tolist()]


FORMS = ["nanogpt", "llm.c", "llm.c 7", "uint16", "int64", ">i4", "int32"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_shards(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "SCAN_TOKENS", 7)
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "train.bin", CLOSED * 3, form)
    write(folder / "val.bin", CLOSED, form)
    manifest = prepared(tmp_path / "out", folder, shard_tokens=50)
    assert side_of(tmp_path / "out", "train") == OPENED * 3  # nanoGPT closes a document, we open it
    assert side_of(tmp_path / "out", "val") == OPENED
    assert (manifest.documents, manifest.tokenizer.name) == (12, "bytes")
    assert verify(tmp_path / "out").ok
    assert prepared(tmp_path / "out", folder, shard_tokens=50) == manifest


@pytest.mark.parametrize(("ids", "documents"), [(OPENED, 3), (DOCUMENTS[0], 1)])
def test_ids_that_open_documents_stay_and_those_without_any_get_one(
    tmp_path: Path, ids: list[int], documents: int
) -> None:
    manifest = prepared(tmp_path / "out", write(tmp_path / "a.bin", ids), val_share=0.0)
    assert side_of(tmp_path / "out", "train") == [*([] if ids is OPENED else [END]), *ids]
    assert manifest.documents == documents


def test_without_a_file_of_validation_the_end_of_the_last_becomes_it(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.bin", OPENED * 100) for name in ("a", "b")]
    manifest = prepared(tmp_path / "out", *files, val_share=0.05)
    assert manifest.side_tokens("val") / manifest.tokens == pytest.approx(0.05, rel=0.01)
    both = side_of(tmp_path / "out", "train") + side_of(tmp_path / "out", "val")
    assert sorted(both) == sorted([*OPENED * 200, *([END] if len(both) > 200 * len(OPENED) else [])])


@pytest.mark.parametrize(("name", "cure"), [("val.bin", "a longer file of validation"), ("b.bin", "--val-share")])
def test_a_remark_on_validation_names_what_would_change_it(
    tmp_path: Path, name: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path / each, OPENED * 100)) for each in ("a.bin", name)]
    assert data.prepare([*files, "--ids-of", "bytes", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert cure in said
    assert ("--val-share" in said) == (name != "val.bin")


@pytest.mark.parametrize(
    ("name", "is_val"),
    [("val.bin", True), ("fineweb_val_000000.bin", True), ("validation.npy", True), ("a-valid1.bin", True),
     ("train.bin", False), ("interval.bin", False), ("values.bin", False)],
)  # fmt: skip
def test_files_of_validation_are_known_by_their_names(name: str, is_val: bool) -> None:
    assert is_validation(name) == is_val


@pytest.mark.parametrize(("form", "wrong"), [("nanogpt", 257), ("int64", 70_000), ("int32", -1), ("llm.c 7", 128_000)])
def test_an_id_that_the_tokenizer_does_not_have_is_named(tmp_path: Path, form: str, wrong: int) -> None:
    path = write(tmp_path / "train.bin", [*CLOSED, wrong], form)
    with pytest.raises(DataError, match=rf"token {len(CLOSED)} has id {wrong}, not one of the 257 of bytes.*--ids-of"):
        prepared(tmp_path / "out", path, val_share=0.0)


def test_files_that_hold_no_ids_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "broken.npy").write_bytes(b"none")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "wide.bin").write_bytes(np.arange(100, dtype="<u4").tobytes())
    (tmp_path / "cut.bin").write_bytes(llm_c(CLOSED, WIDE_MAGIC, 7, "<u4")[:-1])
    said = {
        "float.npy": "an array of float64",
        "object.npy": "pickled objects, which are never read",
        "broken.npy": "not a readable .npy",
        "odd.bin": "3 bytes, which are no 16-bit ids",
        "wide.bin": "32-bit ids without a header; save them as .npy",
        "cut.bin": "its header counts",
    }
    for name, problem in said.items():
        with pytest.raises(DataError, match=rf"{name}: .*{problem}"):
            prepared(tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_text_is_not_taken_for_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for given in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError, match=r"\.bin, \.npy"):
            prepared(tmp_path / "out", given)
    with pytest.raises(ConfigError, match=r"--ids-of bytes.*leave out --tokenizer"):
        PrepareConfig(inputs=("x",), out="y", ids_of="bytes", tokenizer="bpe-300")
    with pytest.raises(ConfigError, match="--ids-of bpe-300"):
        PrepareConfig(inputs=("x",), out="y", ids_of="bpe-300")


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("sprung"),))  # type: ignore[return-value]


@pytest.mark.parametrize("form", ["nanogpt", "int64", "llm.c 7"])
def test_prepare_and_verify_give_the_command_that_makes_shards_and_it_works(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("with blank")
    folder.mkdir()
    path = write(folder / "train.bin", CLOSED, form)
    (folder / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    for given in (path, folder):
        with pytest.raises(DataError) as caught:
            data.prepare([str(given), "--out", "out"])
        said = str(caught.value)
        command = said[said.index("`paceline data prepare ") + 1 :]
        command = command[: command.index("`")]
        assert ("meta.pkl" in said) == (form != "llm.c 7")
    assert shlex.quote(str(folder)) in command
    if path.suffix == ".bin":
        assert data.verify([str(path)]) == data.verify([str(folder)]) == 1
        assert capsys.readouterr().out.count("--ids-of") == 2
    else:
        with pytest.raises(DataError) as caught:
            data.verify([str(folder)])
        assert command in str(caught.value)
    _, _, _, *arguments = shlex.split(command)
    arguments = [{"FOLDER": "out", "gpt2": "bytes", "TOKENIZER": "bytes"}.get(word, word) for word in arguments]
    if form == "nanogpt":  # ids of characters fit into most vocabularies
        with pytest.raises(DataError, match=r"meta.pkl beside ids.*of characters.*input.txt.*move meta.pkl away"):
            data.prepare([*arguments, "--val-share", "0"])
    (folder / "meta.pkl").unlink()
    assert data.prepare([*arguments, "--val-share", "0"]) == 0
    assert side_of(Path("out"), "train") == OPENED
    assert not Path("sprung").exists()


@pytest.mark.parametrize("name", ["x.txt.gz", "x.csv", "x.json", "x.arrow", "x.jsonl.zst"])
def test_verify_of_text_gives_the_command_that_makes_shards(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"text")
    assert data.verify([str(tmp_path / name)]) == 1
    assert f"`paceline data prepare {tmp_path / name} --out FOLDER`" in capsys.readouterr().out
    with pytest.raises(DataError, match=rf"`paceline data prepare {tmp_path} --out FOLDER`"):
        data.verify([str(tmp_path)])


@pytest.mark.parametrize("more", [[], ["--ids-of", "gpt2"]])
def test_a_pickle_is_called_one_and_not_opened(
    tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("meta.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"meta.pkl: a pickle, which is never opened.*--ids-of"):
        data.prepare(["meta.pkl", "--out", "out", *more])
    assert not Path("sprung").exists()


def test_ids_of_gpt2_need_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise PacelineError("no network")

    monkeypatch.setattr("paceline.text.tokenizer.gpt2_tokenizer", away)
    path = write(tmp_path / "train.bin", [*DOCUMENTS[0], 50_256, *DOCUMENTS[1], 50_256])
    options = {"ids_of": "gpt2", "val_share": 0.0, "shard_tokens": 10}
    manifest = prepared(tmp_path / "out", path, **options)
    assert side_of(tmp_path / "out", "train") == [50_256, *DOCUMENTS[0], 50_256, *DOCUMENTS[1]]
    assert (manifest.tokenizer.name, manifest.tokenizer.fingerprint) == ("gpt2", GPT2_FINGERPRINT)
    assert verify(tmp_path / "out").ok
    assert prepared(tmp_path / "out", path, **options) == manifest
    following_data = paceline.configure("demo", {"data.dir": tmp_path / "out"})
    assert (following_data.data.tokenizer, following_data.model.vocab_size) == ("gpt2", 50_257)


@pytest.mark.parametrize("form", ["nanogpt", "llm.c 7"])
def test_training_on_ids_of_others_names_the_command_that_converts_them(tmp_path: Path, form: str) -> None:
    for name in ("train.bin", "val.bin"):
        write(tmp_path / name, CLOSED * 100, form)
    with pytest.raises(DataError, match=rf"`paceline data prepare {tmp_path} --out FOLDER --ids-of"):
        paceline.configure("demo", {"data.dir": tmp_path})
    with pytest.raises(DataError, match=rf"`paceline data prepare {tmp_path} --out FOLDER --ids-of"):
        open_corpus(tmp_path, "val.bin", 300)


def test_llm_cs_own_shards_of_16_bits_verify_as_before(tmp_path: Path) -> None:
    write(tmp_path / "x_train_000001.bin", OPENED, "llm.c")
    assert verify(tmp_path).ok
    assert len(positions_of(open_shard(tmp_path / "x_train_000001.bin"), END)) == 3


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that opens and cannot be read")
def test_a_file_that_cannot_be_read_is_one_line_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").symlink_to("/proc/self/mem")
    (check,) = verify(tmp_path).files
    assert check.problem is not None
    assert "cannot be read (Input/output error)" in check.problem
