"""Weights go to Hugging Face and come from there, and compute the same on both sides."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test_worker import run_ranks
from trimaran.files.catalogue import load_model
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.train.run.first_weights import first_weights
from trimaran.train.state import hugging_face
from trimaran.train.state.hugging_face import HuggingFaceWeights, write_folder
from trimaran.train.state.weight_source import open_source, whole_logits, whole_model
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokens import Tokens

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
VOCAB = 300
KINDS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_layer=3, n_embd=48, n_head=4, n_positions=64),
    "gpt2, exact gelu, untied": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_layer=2, n_embd=48, n_head=4, activation_function="gelu", tie_word_embeddings=False
    ),
    # 6 heads are no power of two, for which ALiBi has a rule of its own
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB, n_layer=3, hidden_size=48, n_head=6),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=80, rms_norm_eps=1e-6,
    ),
    "llama, tied, wide heads, stretched": lambda: transformers.LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=2, hidden_size=48, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=80, head_dim=16, tie_word_embeddings=True, max_position_embeddings=256,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    ),
}  # fmt: skip


def hugging_face_model(kind: str) -> Any:
    """A model whose every parameter is drawn, biases and norms too, so that none can be forgotten."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 50), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=KINDS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = hugging_face_model(request.param)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


@torch.no_grad()
def test_logits_are_those_of_transformers_both_ways(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    reference, folder = theirs
    expected = reference(some_tokens()).logits
    source = open_source(folder)
    ours = whole_logits(whole_model(source, CPU, torch.float32), some_tokens())
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)

    write_folder(source.model, source.read, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    torch.testing.assert_close(back(some_tokens()).logits, ours, rtol=0, atol=1e-4)
    assert torch.equal(back(some_tokens()).logits, expected)
    assert load_model(str(tmp_path / "back" / "config.json")).model_dump(exclude={"name"}) == source.model.model_dump(
        exclude={"name"}
    )


def test_large_models_are_written_as_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face_model("gpt2").save_pretrained(tmp_path / "theirs")
    source = HuggingFaceWeights(tmp_path / "theirs")
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 100_000)
    write_folder(source.model, source.read, tmp_path / "ours")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    again = HuggingFaceWeights(tmp_path / "ours")
    for name in hugging_face.entries(source.model):
        assert torch.equal(source.read(name), again.read(name))
    assert not list(tmp_path.glob(".*partial*"))


def test_names_without_the_prefix_are_found(tmp_path: Path) -> None:
    """As the first published files of GPT-2 and BLOOM have them."""
    from safetensors.torch import load_file, save_file

    hugging_face_model("bloom").save_pretrained(tmp_path)
    expected = HuggingFaceWeights(tmp_path).read("layers.1.attention.qkv.weight")
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(HuggingFaceWeights(tmp_path).read("layers.1.attention.qkv.weight"), expected)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_training_begins_with_the_weights_it_is_given(
    make_job: Callable[..., TrainJob], tmp_path: Path, kind: str
) -> None:
    reference = hugging_face_model(kind)
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path / "config.json"))
    job = make_job("tp2,pp2,mbs12", model=model, steps=1, init_from=str(tmp_path))
    assert [(run.returncode, run.stderr) for run in run_ranks(job, 4)] == [(0, "")] * 4
    loss = json.loads((Path(job.out_dir) / "result.json").read_text())["losses"][0]
    text = torch.from_numpy(Sampler(Tokens(Path(job.data_dir)), 16, job.train.seed).batch(0, 24))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            reference(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten()
        ).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_weights_of_another_model_are_refused_with_both_numbers(
    make_job: Callable[..., TrainJob], tmp_path: Path
) -> None:
    hugging_face_model("gpt2").save_pretrained(tmp_path)
    job = make_job("mbs24", init_from=str(tmp_path))
    with pytest.raises(TrimaranError, match=r"train\.init_from: .* layers 3, model\.layers is 8"):
        first_weights(job, lambda: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bias": False}, "model.bias is False, Hugging Face's gpt2 has True"),
        ({"positions": "rotary"}, "Hugging Face's llama has rmsnorm"),
        ({"positions": "alibi"}, "Hugging Face's bloom has True"),
    ],
    ids=str,
)
def test_a_model_that_hugging_face_lacks_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    model = Model.model_validate({"layers": 2, "hidden": 48, "heads": 4, "vocab": VOCAB, **change})
    with pytest.raises(TrimaranError, match=says):
        write_folder(model, lambda name: torch.zeros(1), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_lacks_tensors_is_told_in_one_line(tmp_path: Path) -> None:
    hugging_face_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(TrimaranError, match=r"has no tensor model\.layers\.3") as caught:
        whole_model(open_source(tmp_path), CPU, torch.float32)
    assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(TrimaranError, match="cannot be read"):
        open_source(tmp_path)


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd", "sub/w.safetensors", "..", "", 7])
def test_an_index_that_points_out_of_its_folder_is_refused_by_name(tmp_path: Path, outside: object) -> None:
    folder = tmp_path / "model"
    hugging_face_model("llama").save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": outside}}))
    with pytest.raises(TrimaranError, match=r"model\.embed_tokens\.weight.* no file of that folder"):
        open_source(folder)
    for content in ("[]", "{}", '{"weight_map": []}', "[" * 50_000):
        index.write_text(content)
        with pytest.raises(TrimaranError, match=r"index\.json"):
            open_source(folder)


def test_weights_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    hugging_face_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(TrimaranError, match="not a regular file"):
        open_source(tmp_path)


def test_a_folder_that_finds_no_room_is_told_in_one_line_and_leaves_nothing(
    small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    hugging_face_model("gpt2").save_pretrained(tmp_path / "theirs")
    source, disk = HuggingFaceWeights(tmp_path / "theirs"), small_disk(1)
    (disk / "filler").write_bytes(b"x" * 1_000_000)
    with pytest.raises(TrimaranError, match=r"out cannot be written: .*free space") as error:
        write_folder(source.model, source.read, disk / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in disk.iterdir()] == ["filler"]
