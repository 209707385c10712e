"""Nouns come from the catalogue, TOML and Hugging Face configs; mistakes are told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trimaran.cost.calibration import load_calibration
from trimaran.files.catalogue import (
    catalogue_names,
    dump_toml,
    load_cluster,
    load_device,
    load_faults,
    load_model,
    load_stack,
    unknown_name,
)
from trimaran.files.recipe_file import load_recipe
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.noun import TrimaranError

DESIGN_CLUSTERS = {
    "fugaku-a64fx",
    "jean-zay-v100-16gb",
    "jean-zay-v100-32gb",
    "jean-zay-a100-80gb",
    "aws-p3-2xlarge",
    "aws-p3-16xlarge",
    "a100-8x-node",
    "dlperf-v100",
    "llm-foundry-a100-40gb",
    "dgx-h100",
    "dgx-h200",
}


def test_every_catalogue_entry_loads() -> None:
    loaders = {"models": load_model, "devices": load_device, "clusters": load_cluster, "stacks": load_stack}
    for kind, load in loaders.items():
        for name in catalogue_names(kind):
            assert load(name).name == name
    assert set(catalogue_names("clusters")) >= DESIGN_CLUSTERS


@pytest.mark.parametrize(
    ("name", "billions"),
    [("bloom-176b", 176.25), ("gpt2-124m", 0.124), ("gpt3-175b", 174.6), ("llama3-8b", 8.03), ("llama2-70b", 68.98)],
)
def test_published_sizes_are_counted(name: str, billions: float) -> None:
    assert load_model(name).parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_hugging_face_configs_of_four_kinds_are_models(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    neox = {
        "model_type": "gpt_neox",
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "vocab_size": 50432,
    }
    bloom = {"model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880}
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    billions = {"gpt2": 0.124, "gpt_neox": 20.55, "bloom": 176.25, "llama": 8.03}
    for config in (gpt2, neox, bloom, llama):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        assert load_model(str(path)).parameters / 1e9 == pytest.approx(billions[config["model_type"]], rel=1e-2)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
}
STRETCHED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **STRETCHED}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **STRETCHED}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_a_llama_config_states_its_angles_and_its_norm(tmp_path: Path, rotary: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | rotary))
    model = load_model(str(tmp_path / "config.json"))
    assert (model.rotary_theta, model.norm_epsilon) == (500_000.0, 1e-6)
    assert model.rotary_scaling is not None and model.rotary_scaling.original_max_positions == 8192


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rotary scaling 'ntk'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
    ids=str,
)
def test_a_config_that_means_another_model_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(TrimaranError, match=says):
        load_model(str(tmp_path / "config.json"))


def test_the_gelu_is_the_familys(tmp_path: Path) -> None:
    families = {"gpt2-124m": "gelu_tanh", "gpt3-175b": "gelu_tanh", "bloom-176b": "gelu_tanh"}
    assert {name: load_model(name).activation for name in families} == families
    neox = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "vocab_size": 100, **neox}))
    assert load_model(str(tmp_path / "config.json")).activation == "gelu"


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(TrimaranError, match="did you mean 'jean-zay-a100-80gb'"):
        load_cluster("jean-zay-a100-80g")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers = 0\nhidden = 64\nheads = 4\nvocab = 100", "layers"),
        ("layers = 2\nhidden = 65\nheads = 4\nvocab = 100", "hidden 65 is not a multiple of heads 4"),
        ("layers = 2\nhidden = 64\nheads = 4\nvocab = 'many'", "vocab"),
        ("layers = 2\nhidden = 64\nheads = 4\nvocab = nan", "vocab"),
        ("layers = 2\nhidden = 64\nheads = 4\nvocab = 100\nlayer = 3", "layer"),
        ("layers = 2\nhidden = 64\nheads = 4", "vocab"),
        ("layers = [", "not valid TOML"),
        ("heads = 4\nkv_heads = 3\nlayers = 1\nhidden = 64\nvocab = 100", "kv_heads 3"),
    ],
)
def test_a_bad_model_file_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(TrimaranError, match=r"model\.toml") as caught:
        load_model(str(path))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, "1e30", "nan", "inf", "'text'", "true"])
@pytest.mark.parametrize("field", ["nodes", "devices_per_node"])
def test_impossible_cluster_numbers_are_refused(tmp_path: Path, field: str, value: object) -> None:
    lines = {"device": "'a100-sxm-80gb'", "nodes": 1, "devices_per_node": 8} | {field: value}
    text = "\n".join(f"{key} = {val}" for key, val in lines.items())
    links = "\n[intra]\nbandwidth_gbps = 1\nlatency_us = 1\n[inter]\nbandwidth_gbps = 1\nlatency_us = 1\n"
    path = tmp_path / "cluster.toml"
    path.write_text(text + links)
    with pytest.raises(TrimaranError, match=field):
        load_cluster(str(path))


def test_a_written_cluster_reads_back(tmp_path: Path) -> None:
    cluster: Cluster = load_cluster("aws-p3-16xlarge")
    dump_toml(cluster, tmp_path / "c.toml")
    assert load_cluster(str(tmp_path / "c.toml")) == cluster


def test_an_unreadable_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TrimaranError, match="not UTF-8"):
        load_model(str(tmp_path / "binary.toml"))
    with pytest.raises(TrimaranError, match="No such file"):
        load_model(str(tmp_path / "absent.toml"))


def test_a_full_disk_loses_nothing() -> None:
    with pytest.raises(TrimaranError, match="cannot be written"):
        dump_toml(load_cluster("dgx-h100"), "/dev/full/x.toml")


def test_a_recipe_with_a_misspelt_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[modle]\nname='gpt2-124m'\n")
    with pytest.raises(TrimaranError, match="modle"):
        load_recipe(str(path))


def test_a_file_that_steers_a_parser_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    for text in ("[" * 100_000, '{"layers": ' + "9" * 5000 + "}", "null", ""):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(TrimaranError, match=r"config\.json"):
            load_model(str(path))
    with pytest.raises(TrimaranError, match="check the path"):
        load_model("a\0b.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("layers = 2\nhidden = 64\nheads = 4\nvocab = 100\n", encoding="utf-8-sig")
    assert load_model(str(path)).hidden == 64


@pytest.mark.parametrize("value", ["''", "[]", "{}", "-1", "1e30", "nan"])
def test_only_zero_stands_for_a_derived_size(tmp_path: Path, value: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(f"layers = 2\nhidden = 64\nheads = 4\nvocab = 100\nffn_hidden = {value}\n")
    with pytest.raises(TrimaranError, match="ffn_hidden"):
        load_model(str(path))


def test_a_stack_is_like_the_one_it_extends_but_for_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "mine.toml").write_text('extends = "near/base.toml"\noverlap_dp = 0.5\n')
    (tmp_path / "near" / "base.toml").write_text('extends = "torch-fsdp"\nfused_gelu = true\noverlap_dp = 0.1\n')
    known, mine = load_stack("torch-fsdp"), load_stack(str(tmp_path / "mine.toml"))
    differs = {"name": "mine", "overlap_dp": 0.5, "fused_gelu": True}
    assert mine == known.model_copy(update=differs)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "r"\n[model]\nname = "gpt2-124m"\n[workload]\nseq_len = 64\nglobal_batch = 4\n'
        '[stack]\nname = "mine"\nextends = "mine.toml"\n'
    )
    assert load_recipe(str(recipe)).stack == mine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "other.toml"', "which is a circle: leave one out"),
        ('extends = "../{folder}/wrong.toml"', "which is a circle: leave one out"),
        ('extends = "torch-fsdpp"', "did you mean 'torch-fsdp'?"),
        ('extends = ["torch-fsdp"]', "expected the catalogue name or file of one stack"),
    ],
)
def test_a_stack_that_extends_what_it_cannot_is_told_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.toml").write_text(text.replace("{folder}", tmp_path.name))
    (tmp_path / "other.toml").write_text('extends = "wrong.toml"')
    with pytest.raises(TrimaranError) as told:
        load_stack(str(tmp_path / "wrong.toml"))
    assert said in str(told.value) and "\n" not in str(told.value)


def test_a_cluster_file_with_a_shaped_network_is_refused(tmp_path: Path) -> None:
    """Its delays were not counted, and a plan on it was faster than without it."""
    file = tmp_path / "cluster.toml"
    dump_toml(load_cluster("dgx-h100"), file)
    text = file.read_text()
    assert load_cluster(str(file)).nodes
    pair = "{nodes = [0, 1], latency_ms = 60, bandwidth_gbps = 1}"
    file.write_text(f'{text}\n[shaped]\nname = "far"\nlatency_ms = 1\nbandwidth_gbps = 10\npairs = [{pair}]\n')
    with pytest.raises(TrimaranError, match=r"shaped is no section of a cluster.*\[\[sweep.networks\]\]"):
        load_cluster(str(file))


@pytest.mark.parametrize(
    "load", [load_model, load_device, load_cluster, load_stack, load_faults, load_recipe, load_calibration]
)
@pytest.mark.parametrize("text", ["", "# to be filled in\n"])
def test_a_file_that_states_nothing_is_refused_as_empty(
    text: str, load: Callable[[str], object], tmp_path: Path
) -> None:
    (tmp_path / "nothing.toml").write_text(text)
    with pytest.raises(TrimaranError, match=r"nothing\.toml is empty: give a TOML file"):
        load(str(tmp_path / "nothing.toml"))


def test_a_card_that_the_catalogue_lacks_is_not_taken_for_a_cluster_of_others() -> None:
    for name in ("rtx-4090", "rtx-5090", "l40s"):
        assert "did you mean" not in unknown_name("clusters", name) and "dgx-h100" in unknown_name("clusters", name)
    for name, meant in (("h100", "dgx-h100"), ("gb200", "gb200-nvl72"), ("dgx-h20", "dgx-h200")):
        assert f"did you mean {meant!r}?" in unknown_name("clusters", name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("DGX-H100", "dgx-h100"), ("DGXH100", "dgx-h100"), ("H200", "dgx-h200"), ("Frontier", "frontier-mi250x")],
)
def test_a_name_in_capitals_or_set_apart_otherwise_is_told_the_catalogues(name: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in unknown_name("clusters", name)


def test_a_name_that_several_are_like_is_told_the_others_too() -> None:
    """`llama` was told llama2-7b alone, and `megatron-lm` the software of 2021 alone."""
    assert "'llama2-7b'? Others like it: llama3-8b, " in unknown_name("models", "llama")
    assert "did you mean 'megatron'? Others like it: " in unknown_name("stacks", "megatron-lm")
    assert "megatron-core" in unknown_name("stacks", "megatron-lm")
    assert "Others" not in unknown_name("clusters", "jean-zay-a100-80g")


def test_a_model_that_hugging_face_has_is_told_what_to_give_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, way_out in (
        ("meta-llama/Llama-3.1-8B", "give 'llama3.1-8b' of the catalogue, or the path of a config.json"),
        ("mistralai/Mixtral-8x22B-v0.1", "nothing is fetched from Hugging Face: give the path of a config.json"),
    ):
        with pytest.raises(TrimaranError, match=f"{name}: there is no such file, and .*{way_out}"):
            load_model(name)
    for name in ("meta-llama/model.toml", "./llama", "~/llama", "llama/"):
        with pytest.raises(TrimaranError, match="cannot be read"):
            load_model(name)


def test_the_folder_of_a_config_json_is_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 32}
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    monkeypatch.chdir(tmp_path)
    for name in ("./gpt", "gpt/", str(tmp_path / "gpt")):
        assert load_model(name).layers == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrimaranError, match="it is not a regular file but a folder"):
        load_model("./empty")


def test_a_model_that_the_catalogue_lacks_is_given_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "any other model's own config.json serves" in unknown_name("models", "gemma3-27b")
    assert "any other model's own config.json serves" in unknown_name("models", "g" * 5000)
    assert "config.json" not in unknown_name("clusters", "our-rack")
    # as a download leaves it, in the folder where the command is given
    (tmp_path / "gemma3-27b").mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}
    (tmp_path / "gemma3-27b" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrimaranError, match=r"is given as \./gemma3-27b\."):
        load_model("gemma3-27b")
    assert load_model("./gemma3-27b").layers == 2
