"""What was trained can be sampled and handed on: checkpoint, text and Hugging Face folder say the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from command import run as trimaran
from shapes import LLAMA
from test_worker import run_ranks
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import SampleJob, TrainJob
from trimaran.train.programs import continuation as continuing
from trimaran.train.programs.continuation import choose
from trimaran.train.programs.sample import sample
from trimaran.train.state.weight_files import find_checkpoint
from trimaran.train.state.weight_source import open_source, whole_logits, whole_model

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPT = "def "


@pytest.fixture(scope="module")
def study(make_job: Callable[..., TrainJob], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with two checkpoints of a Llama, saved by two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("study")
    model = LLAMA.model_copy(update={"heads": 4, "kv_heads": 2, "head_dim": 12, "layers": 2})
    job = make_job("tp2,mbs24", model=model, steps=40, learning_rate=1e-2, checkpoint_every=20)
    job = job.model_copy(update={"checkpoint_dir": str(folder / "checkpoints")})
    assert [run.returncode for run in run_ranks(job, 2)] == [0, 0]
    return folder


@pytest.mark.proof
def test_a_checkpoint_converted_writes_the_same_text_as_transformers(study: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = trimaran("convert", str(study), "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    ours = whole_model(open_source(study / "checkpoints" / "step-00000040"), torch.device("cpu"), torch.float32)
    assert theirs.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 256
    with torch.no_grad():
        torch.testing.assert_close(whole_logits(ours, tokens), theirs(tokens).logits, rtol=0, atol=1e-4)

    told = theirs.generate(tokens, do_sample=False, max_new_tokens=10)
    expected = tokenizer.decode(told[0])
    sampled = trimaran("sample", str(study), "--prompt", PROMPT, "--tokens", "10", "--temperature", "0")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout == expected + "\n"
    told_again = trimaran("convert", str(study), "-o", str(tmp_path / "out"))
    assert told_again.returncode == 2 and "exists: choose another folder" in told_again.stderr


def test_the_newest_whole_checkpoint_is_taken(study: Path, tmp_path: Path) -> None:
    copied = tmp_path / "study"
    shutil.copytree(study, copied)
    newest = copied / "checkpoints" / "step-00000040"
    assert find_checkpoint(copied) == find_checkpoint(copied / "checkpoints") == newest
    weights = newest / "rank-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert find_checkpoint(copied) == copied / "checkpoints" / "step-00000020"
    with pytest.raises(TrimaranError, match="has changed"):
        find_checkpoint(newest)


def test_a_training_begins_with_a_checkpoints_weights(
    study: Path, make_job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    source = open_source(study)
    job = make_job("mbs24", model=source.model, steps=1, init_from=str(study))
    assert [run.returncode for run in run_ranks(job, 1)] == [0]
    loss = json.loads((Path(job.out_dir) / "result.json").read_text())["losses"][0]
    assert loss < 4.5  # ln 300 = 5.7 is where a drawn model begins


def test_a_folder_without_weights_is_told_in_one_line(tmp_path: Path) -> None:
    done = trimaran("sample", str(tmp_path))
    assert done.returncode == 2
    assert "has no weights" in done.stderr and done.stderr.count("\n") == 1
    done = trimaran("sample", str(tmp_path / "absent"))
    assert "absent does not exist: name a checkpoint" in done.stderr and done.stderr.count("\n") == 1
    assert trimaran("sample", str(tmp_path), "--temperature", "nan").returncode == 2


def test_tokens_are_drawn_as_likely_as_the_model_says() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0, -1.0])
    generator = torch.Generator().manual_seed(1)

    def shares(temperature: float, top_k: int | None) -> list[float]:
        drawn = [choose(scores, temperature, top_k, generator) for _ in range(4000)]
        return [drawn.count(token) / 4000 for token in range(4)]

    assert shares(0, None) == [0, 1, 0, 0]
    assert shares(1.0, None) == pytest.approx(scores.softmax(0).tolist(), abs=0.03)
    assert shares(2.0, None) == pytest.approx((scores / 2).softmax(0).tolist(), abs=0.03)
    assert shares(1.0, 2) == pytest.approx([0, *scores[1:3].softmax(0).tolist(), 0], abs=0.03)


def test_the_space_between_a_prompt_and_what_follows_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 2's and Mistral's tokenizers decode a text without the space that stands before its first word."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = transformers.LlamaConfig(
        vocab_size=16, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "\u2581Once", "\u2581upon", "\u2581a"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    follow = [words["\u2581upon"], words["\u2581a"], words["</s>"]]
    monkeypatch.setattr(continuing, "continuation", lambda files, prompt, job: iter(follow))
    sample(SampleJob(source=str(tmp_path), prompt="Once"))
    assert capsys.readouterr().out == "Once upon a\n"


def test_a_tokenizer_changed_under_a_checkpoint_is_refused_by_name(study: Path, tmp_path: Path) -> None:
    copied = tmp_path / "study"
    shutil.copytree(study, copied)
    for checkpoint in (copied / "checkpoints").iterdir():
        tokenizer = checkpoint / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace('"a"', '"b"', 1))
    with pytest.raises(TrimaranError, match=r"tokenizer\.json has changed"):
        find_checkpoint(copied)
