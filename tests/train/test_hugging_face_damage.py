"""Folders of weights that are not those of their configuration are refused by the name of the tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.job import ConvertJob, SampleJob
from trimaran.train.programs.continuation import choose
from trimaran.train.programs.convert import convert
from trimaran.train.programs.sample import sample
from trimaran.train.state.weight_source import open_source

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
Q, NORM, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as transformers saves it, with a tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=257, num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(
        models.BPE(vocab={one: n for n, one in enumerate(["<|endoftext|>", *sorted(letters)])}, merges=[])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "llama" / "tokenizer.json"))
    return tmp_path / "llama"


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda t: t.update({Q: torch.zeros(32, 31)}),
            r"q_proj.weight has shape \(32, 31\), the model's is \(32, 32\)",
        ),
        (lambda t: t.update({NORM: torch.zeros(())}), r"norm.weight has shape \(\)"),
        (lambda t: t.update({HEAD: torch.zeros(256, 32)}), r"lm_head.weight has shape \(256, 32\)"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), "q_proj.weight is of int8"),
        (lambda t: t.update({Q: t[Q].bool()}), "q_proj.weight is of bool"),
        (lambda t: t.pop(Q), "has no tensor model.layers.0.self_attn.q_proj.weight"),
        (lambda t: t.update({Q.replace("weight", "bias"): torch.ones(32)}), "has a tensor .*q_proj.bias"),
        (lambda t: t.update({f"{Q}_scale_inv": torch.ones(1)}), "has a tensor .*q_proj.weight_scale_inv"),
        (lambda t: t.update({Q.replace(".0.", ".2."): torch.ones(1)}), "has a tensor .*layers.2.self_attn"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    changed(folder, change)
    with pytest.raises(TrimaranError, match=says):
        convert(ConvertJob(source=str(folder), output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_buffers_that_old_files_hold_are_no_weights(folder: Path, tmp_path: Path) -> None:
    changed(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    convert(ConvertJob(source=str(folder), output=str(tmp_path / "out")))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {
        name for name in load_file(folder / "model.safetensors") if "inv_freq" not in name
    }


def test_the_same_weights_in_another_form_beside_the_model_s_own_file_are_not_read(folder: Path) -> None:
    """As transformers does; Mistral publishes consolidated.safetensors beside model.safetensors."""
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    read = open_source(folder).read("norm.weight")
    torch.testing.assert_close(read, load_file(folder / "model.safetensors")[NORM], rtol=0, atol=0)


def test_packed_weights_and_files_that_are_missing_are_told_before_any_is_read(folder: Path) -> None:
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(TrimaranError, match="quantization_config is 'fp8'"):
        open_source(folder)
    (folder / "config.json").write_text(json.dumps(stated))
    index = {"weight_map": {Q: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TrimaranError, match=r"model-00001-of-00002\.safetensors cannot be read"):
        open_source(folder)


def test_nothing_is_written_of_weights_that_are_no_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(folder, lambda t: t.update({Q: torch.full((32, 32), torch.nan)}))
    with pytest.raises(TrimaranError, match=r"layers\.0\.attention\.qkv\.weight holds numbers that are not finite"):
        sample(SampleJob(source=str(folder), prompt="all"))
    assert capsys.readouterr().out == "", "the prompt is not taken for text of the model"


def test_scores_that_are_no_numbers_are_not_drawn_from() -> None:
    with pytest.raises(TrimaranError, match="scores are not numbers"):
        choose(torch.tensor([0.0, torch.nan]), 0.8, None, torch.Generator())


@pytest.mark.parametrize("temperature", [5e-324, 1e-30])
def test_at_the_lowest_temperatures_the_likeliest_token_is_drawn(temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    assert choose(logits, temperature, None, torch.Generator()) == 1
