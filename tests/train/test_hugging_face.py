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

from pool import Pool
from test_gpt import make_trainer
from test_worker import run_ranks
from trimaran.files.catalogue import load_model
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import TrainJob
from trimaran.train.run.first_weights import first_weights
from trimaran.train.state import hugging_face
from trimaran.train.state.hugging_face import write_folder
from trimaran.train.state.weight_source import open_source, whole_logits, whole_model
from trimaran.train.text.sampler import Sampler
from trimaran.train.text.tokenizer import train_bpe
from trimaran.train.text.tokens import Tokens

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
VOCAB = 300
# 6 and 2 heads are cut over TP of 2; three layers are cut over two stages unevenly.
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 6.0, "original_max_position_embeddings": 16, "beta_fast": 3.0,
}  # fmt: skip
QUARTER = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
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
    "llama, stretched from one wavelength on": lambda: transformers.LlamaConfig(
        **LLAMA_SIZES, num_key_value_heads=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 1.0, "original_max_position_embeddings": 16},
    ),
    "llama, biases everywhere": lambda: transformers.LlamaConfig(
        **LLAMA_SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: transformers.MistralConfig(**LLAMA_SIZES, num_key_value_heads=2, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_SIZES, num_key_value_heads=2),
    "qwen2, late windows": lambda: transformers.Qwen2Config(
        **LLAMA_SIZES | {"num_hidden_layers": 2}, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_SIZES, num_key_value_heads=2, head_dim=16),
    "qwen3, yarn": lambda: transformers.Qwen3Config(
        **LLAMA_SIZES, num_key_value_heads=2, head_dim=16, max_position_embeddings=96, rope_parameters=YARN
    ),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA_SIZES, num_key_value_heads=2),
    "phi3": lambda: transformers.Phi3Config(
        **LLAMA_SIZES, num_key_value_heads=2, pad_token_id=None, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA_SIZES, num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**LLAMA_SIZES, rope_parameters=QUARTER | {"rope_theta": 500.0}),
    "gpt_neox, one after the other": lambda: transformers.GPTNeoXConfig(
        **LLAMA_SIZES, rope_parameters=QUARTER | {"partial_rotary_factor": 1.0}, use_parallel_residual=False,
        attention_bias=False, hidden_act="gelu_new", tie_word_embeddings=True,
    ),
}  # fmt: skip
# Families beside the first ones; the logits of these are compared on several layouts.
FAMILIES = tuple(kind for kind in KINDS if kind.split(",")[0] not in ("gpt2", "bloom", "llama"))
LAYOUTS = (
    "tp2,mbs4,sp", "pp2,mbs4", "dp2,mbs4,fsdp", "mbs8", "dp2,tp2,pp2,mbs2,zero1", "dp4,shard2,mbs2,fsdp", "cp2,mbs4",
    "cp4,mbs4,cp-all_gather", "cp2,mbs4,cp-ulysses", "cp2,tp2,pp2,mbs4,sp",
)  # fmt: skip


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

    family = reference.config.model_type
    write_folder(source.model, source.read, tmp_path / "back", family=family)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    torch.testing.assert_close(back(some_tokens()).logits, ours, rtol=0, atol=1e-4)
    # Gemma keeps norms less 1, which rounds
    close = 1e-6 if family == "gemma2" else 0.0
    torch.testing.assert_close(back(some_tokens()).logits, expected, rtol=close, atol=close)
    assert load_model(str(tmp_path / "back" / "config.json")).model_dump(exclude={"name"}) == source.model.model_dump(
        exclude={"name"}
    )


def takes(kind: str, layout: str) -> bool:
    """Whether the family is trained on it: a cap of scores is refused where attention is to parts of the keys."""
    return kind != "gemma2" or parse_layout(layout).cp == 1 or "ulysses" in layout


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[pytest.mark.proof] if layout != LAYOUTS[0] else [])
        for kind in FAMILIES
        for layout in LAYOUTS
        if takes(kind, layout)
    ],
)
def test_logits_are_those_of_transformers_on_every_layout(
    pool: Pool, make_job: Callable[..., TrainJob], tmp_path: Path, kind: str, layout: str
) -> None:
    assert_logits(pool, make_job, layout, hugging_face_model(kind), tmp_path)


def assert_logits(pool: Pool, make_job: Callable[..., TrainJob], layout: str, reference: Any, folder: Path) -> None:
    """Ranks that begin with the weights of theirs give its logits of the first batch."""
    reference.save_pretrained(folder)
    model = load_model(str(folder / "config.json"))
    job = make_job(layout, model=model, global_batch=8, init_from=str(folder))
    text = torch.from_numpy(Sampler(Tokens(Path(job.data_dir)), 16, job.train.seed).batch(0, 8))
    with torch.no_grad():
        expected = reference(text[:, :-1]).logits
    found = torch.stack([torch.from_numpy(sequence) for sequence in pool.logits(job)])
    assert (found - expected).norm() <= 1e-4 * expected.norm()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_are_those_of_transformers(make_job: Callable[..., TrainJob], tmp_path: Path, kind: str) -> None:
    reference = hugging_face_model(kind)
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path / "config.json"))
    job = make_job("mbs4", model=model, global_batch=8, init_from=str(tmp_path))
    text = torch.from_numpy(Sampler(Tokens(Path(job.data_dir)), 16, job.train.seed).batch(0, 8))
    logits = reference(text[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    trainer = make_trainer(job)
    trainer.forward_backward()
    # GPT-NeoX calls its head otherwise in files
    theirs = dict(reference.named_parameters()) | {"embed_out.weight": reference.get_output_embeddings().weight}
    for ours, entry in hugging_face.entries(model, reference.config.model_type).items():
        grads = [theirs[name].grad for name in entry.theirs]
        assert all(grad is not None for grad in grads), ours
        # what joins numbers that differ from ours by a constant does the same to zeros
        expected = entry.join(model, grads) - entry.join(model, [torch.zeros_like(grad) for grad in grads])
        place = trainer.flat.places[ours]
        found = place.weight.main_grad
        found = found if place.spec.real_rows is None else found[: place.spec.real_rows]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()), msg=ours)


def test_large_models_are_written_as_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hugging_face_model("gpt2").save_pretrained(tmp_path / "theirs")
    source = open_source(tmp_path / "theirs")
    monkeypatch.setattr(hugging_face, "SHARD_BYTES", 100_000)
    write_folder(source.model, source.read, tmp_path / "ours")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    again = open_source(tmp_path / "ours")
    for name in hugging_face.entries(source.model, "gpt2"):
        assert torch.equal(source.read(name), again.read(name))
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_the_tokenizer_beside_written_weights_is_the_one_of_the_training(tmp_path: Path, kind: str) -> None:
    """Under a family's own class numbers of Qwen3 were other tokens than those learned, and Gemma's had none at all."""
    hugging_face_model(kind).save_pretrained(tmp_path / "theirs")
    text = "in 1234 words,  it's\n\n\ta b\u00fcrger: 567 "
    trained = train_bpe([[text] * 9], VOCAB)
    source = open_source(tmp_path / "theirs")
    write_folder(source.model, source.read, tmp_path / "ours", trained, kind)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert read(text)["input_ids"] == trained.encode([text])[0].tolist()
    assert (read.decode(read(text)["input_ids"]), read.eos_token_id) == (text, trained.end_of_document)


def test_names_without_the_prefix_are_found(tmp_path: Path) -> None:
    """As the first published files of GPT-2 and BLOOM have them."""
    from safetensors.torch import load_file, save_file

    hugging_face_model("bloom").save_pretrained(tmp_path)
    expected = open_source(tmp_path).read("layers.1.attention.qkv.weight")
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}, path)
    assert torch.equal(open_source(tmp_path).read("layers.1.attention.qkv.weight"), expected)


def losses_at_start(
    make_job: Callable[..., TrainJob], layout: str, reference: Any, folder: Path
) -> tuple[float, float]:
    """Of the first batch, what four ranks that begin with the weights of theirs log, and what theirs computes."""
    reference.save_pretrained(folder)
    model = load_model(str(folder / "config.json"))
    job = make_job(layout, model=model, steps=1, init_from=str(folder))
    assert [(run.returncode, run.stderr) for run in run_ranks(job, 4)] == [(0, "")] * 4
    loss = json.loads((Path(job.out_dir) / "result.json").read_text())["losses"][0]
    text = torch.from_numpy(Sampler(Tokens(Path(job.data_dir)), 16, job.train.seed).batch(0, 24))
    with torch.no_grad():
        logits = reference(text[:, :-1]).logits
    return loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).item()


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.proof)])
def test_a_training_begins_with_the_weights_it_is_given(
    make_job: Callable[..., TrainJob], tmp_path: Path, kind: str
) -> None:
    ours, theirs = losses_at_start(make_job, "tp2,pp2,mbs12", hugging_face_model(kind), tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-5)


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
        ({"positions": "rotary", "kv_heads": 2}, "model.kv_heads is 2, Hugging Face's gpt_neox has 4"),
        ({"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "norm_placement": "after"},
         "model.norm_placement is after, Hugging Face's llama has before"),
        ({"positions": "alibi"}, "Hugging Face's bloom has True"),
    ],
    ids=str,
)  # fmt: skip
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
    small_disk: Callable[..., Path], tmp_path: Path
) -> None:
    hugging_face_model("gpt2").save_pretrained(tmp_path / "theirs")
    source, disk = open_source(tmp_path / "theirs"), small_disk(1)
    (disk / "filler").write_bytes(b"x" * 1_000_000)
    with pytest.raises(TrimaranError, match=r"out cannot be written: .*free space") as error:
        write_folder(source.model, source.read, disk / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in disk.iterdir()] == ["filler"]
