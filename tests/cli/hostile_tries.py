"""Wrong input of every kind to every verb, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from command import MACHINE
from command_answers import MOST_CPU_S, Answer, Try, answer, taken_port
from table_text import table_text
from trimaran.files.row_table import packaged_table
from trimaran.store import Store

WORDS = [
    "", " ", "0", "-1", "1.5", "1e400", "nan", "-inf", "true", "9" * 5000, "x" * 100_000, "a,b", "=cmd|' /C calc'!A0",
    "\x1b[2J\x1b]0;owned\x07", "\u202egnp.exe", "../../etc/passwd", "/dev/zero", "/dev/null", "a\nb", "<script>",
    "%s{0}", "\udcff", "٣", "dp=", "tp=8", "gbs=-1", "status=ok", "sec_per_it<x", "notes~(", "--model", "*",
    "~", ".", "/", "{" * 5000, "[" * 5000, "9" * 400 + ",1,1",
    "llama3-8b", "dgx-h100", "megatron", "seeds", "none", "1,2,3",
]  # fmt: skip
LAYOUTS = [
    "dp1,mbs1", "dp64,mbs4", "dp" + "9" * 5000, "split9x999999-9x999999", "split1x100000", "pp100000,split1x100000",
    "place-tp-tp-tp", "recompute-full" + "9" * 50, "dp2,dp2", "ep8", "zero3,fsdp", "dp٣", "," * 50_000, "vpp3,pp2",
    "dp1 " * 20_000, "place-" + "-" * 10_000, "dp1\x00", "mbs0",
]  # fmt: skip
VALUES: list[object] = [
    "text", "", -1, 0, 1.5, 1e308, 10**30, 10**400, True, None, [], {}, [[]], [{}], {"a": {"b": 1}}, "x" * 100_000,
    "\x1b[2J", "=1+1", "/dev/zero", "../..", [1] * 10_000, ["a", 1, None], "9" * 5000, "bf16", 2**63,
]  # fmt: skip
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 257, "max_positions": 64, "positions": "rotary"}
HF = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300,
    "intermediate_size": 128, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
LINE = " iteration {} / 9 | elapsed time per iteration (ms): 50.0 | global batch size: 8 | lm loss: 2.0 |\n"


class Tries:
    """Draws tries from a seed; the files that they name lie in a folder of their own."""

    def __init__(self, seed: int, folder: Path, taken_port: int) -> None:
        self._random, self._folder, self._port, self._files = random.Random(seed), folder, taken_port, 0
        with Store(folder / "good.sqlite") as store:
            store.add(packaged_table().measurements[0])
        self._store = (folder / "good.sqlite").read_bytes()
        self._csv = table_text(packaged_table().measurements[:1])
        (folder / "machine.toml").write_text(MACHINE)

    def draw(self, count: int) -> Iterator[Try]:
        """So many tries, of every verb in turn."""
        verbs = [getattr(self, name) for name in dir(self) if name.startswith("try_")]
        for number in range(count):
            yield Try(tuple(word.replace("\0", "\ufffd") for word in verbs[number % len(verbs)]()))

    def word(self) -> str:
        return self._random.choice(WORDS)

    def maybe(self, option: str, values: Sequence[str] = WORDS, chance: float = 0.3) -> list[str]:
        return [option, self._random.choice(values)] if self._random.random() < chance else []

    def special(self, suffix: str) -> Path:
        """What is no file with text in it, under the name of one."""
        path = self._path(suffix)
        kind = self._random.randrange(10)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to("/dev/zero")
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.symlink_to(path)
        elif kind == 4:
            with path.open("wb") as file:
                file.truncate(10 << 30)
        elif kind == 5:
            path.write_bytes(self._random.randbytes(5000))
        elif kind == 6:
            path.write_bytes(b"\x00" * 100_000)
        elif kind == 7:
            path.write_text("a." * 50_000 + "a = 1\n" if self._random.random() < 0.5 else '{"a":' * 50_000)
        elif kind == 8:
            path.write_text("")
        return path

    def file(self, suffix: str, table: dict[str, object] | None = None, content: bytes | None = None) -> str:
        """The path of a file that holds something like the table or the content, or of what is no such file."""
        if self._random.random() < 0.3:
            return str(self.special(suffix))
        path = self._path(suffix)
        if table is not None:
            changed = self._changed(table) if self._random.random() < 0.9 else table
            content = (json.dumps(changed) if suffix == ".json" else toml(changed)).encode("utf-8", "replace")
        path.write_bytes(self._damaged(content or b""))
        return str(path)

    def _path(self, suffix: str) -> Path:
        self._files += 1
        return self._folder / f"{self._files}{suffix}"

    def _changed(self, table: dict[str, object]) -> dict[str, object]:
        changed = dict(table)
        name = self._random.choice(list(changed))
        inner = changed[name]
        draw = self._random.random()
        if isinstance(inner, dict) and inner and draw < 0.6:
            changed[name] = self._changed(inner)
        elif draw < 0.8:
            changed[name] = self._random.choice(VALUES)
        elif draw < 0.9:
            del changed[name]
        else:
            changed[self.word()[:200] or "x"] = self._random.choice(VALUES)
        return changed

    def _damaged(self, content: bytes) -> bytes:
        draw, at = self._random.random(), self._random.randrange(len(content) + 1)
        if draw < 0.6:
            return content
        if draw < 0.75:
            return content[:at]
        if draw < 0.9:
            return content[:at] + self._random.randbytes(self._random.randrange(1, 40)) + content[at + 8 :]
        return content[:at] + self.word().encode("utf-8", "replace") + content[at:]

    def model(self) -> str:
        draw = self._random.random()
        if draw < 0.4:
            return self.file(".toml", dict(MODEL))
        return self.file(".json", dict(HF)) if draw < 0.8 else self.word()

    def cluster(self) -> str:
        link: dict[str, object] = {"bandwidth_gbps": 20, "latency_us": 100}
        device: dict[str, object] = {"kind": "cpu", "mem_gib": 4, "mem_bandwidth_gb_s": 10, "cores": 1}
        device["peak_tflops"] = {"fp32": 0.1, "bf16": 0.2}
        table: dict[str, object] = {"nodes": 1, "devices_per_node": 2, "device": device, "intra": link, "inter": link}
        return (
            self.file(".toml", table) if self._random.random() < 0.6 else self._random.choice(["dgx-h100", self.word()])
        )

    def stack(self) -> str:
        table: dict[str, object] = {"framework": "trimaran", "precisions": ["fp32", "bf16"], "zero_stages": [0, 1]}
        return self.file(".toml", table) if self._random.random() < 0.6 else self.word()

    def recipe(self) -> str:
        """A recipe that cannot be run, whatever else is wrong with it: it asks for 64 ranks of a machine of two."""
        sweep: dict[str, object] = {"layouts": ["dp64,mbs4"], "steps": 3, "warmup_steps": 1, "fixed": {}}
        sweep["variants"] = [{"environment": {"OMP_NUM_THREADS": "1"}}]
        table: dict[str, object] = {
            "name": "hostile", "stack": "trimaran", "cluster": "machine.toml", "model": dict(MODEL),
            "workload": {"seq_len": 32, "global_batch": 4}, "data": {"paths": ["absent.txt"], "tokenizer": "bytes"},
            "sweep": sweep, "train": {"steps": 12, "init_from": "absent", "track": ["tensorboard"]},
        }  # fmt: skip
        changed = {
            name: value if name == "sweep" else self._changed({name: value}).get(name) for name, value in table.items()
        }
        kept = changed if self._random.random() < 0.7 else table
        return self.file(".toml", {name: value for name, value in kept.items() if value is not None} | {"sweep": sweep})

    def table(self) -> str:
        if self._random.random() < 0.3:
            return self.file(".csv", content=self._csv.encode())
        header, row = (line.split(",") for line in self._csv.splitlines()[:2])
        row = (row + [""] * len(header))[: len(header)]
        row[self._random.randrange(len(row))] = json.dumps(self.word()).replace("\\n", " ")
        return self.file(".csv", content=(",".join(header) + "\n" + ",".join(row) + "\n").encode("utf-8", "replace"))

    def store(self) -> str:
        return self.file(".sqlite", content=self._store)

    def question(self) -> list[str]:
        words = ["--model", self.model() if self._random.random() < 0.5 else "gpt2-124m"]
        words += ["--cluster", self.cluster() if self._random.random() < 0.5 else "dgx-h100"]
        words += ["--gbs", self.word() if self._random.random() < 0.2 else "64"]
        words += ["--stack", self.stack()] if self._random.random() < 0.2 else []
        return words + self.maybe("--seq-len")

    def try_plan(self) -> list[str]:
        words = ["plan", *self.question(), "--devices", "8", *self.maybe("--fix"), *self.maybe("--ramp-up")]
        words += self.maybe("--why", LAYOUTS) + self.maybe("--objective") + self.maybe("--tokens") + self.maybe("--top")
        return words + self.maybe("--mem-margin") + self.maybe("--price") + self.calibration()

    def calibration(self) -> list[str]:
        return (
            ["--calibration", self.file(".toml", {"gemm": 0.8, "days": {"a": 1.0}})]
            if self._random.random() < 0.3
            else []
        )

    def try_export(self) -> list[str]:
        words = ["export", *self.question(), *self.maybe("--layout", LAYOUTS, 0.7), *self.maybe("--to")]
        return words + (["-o", str(self.special(".txt"))] if self._random.random() < 0.3 else [])

    def try_timeline(self) -> list[str]:
        words = ["timeline", *self.question(), "--layout", self._random.choice(LAYOUTS), *self.calibration()]
        return [*words, "-o", str(self._folder / "timeline.json")]

    def try_predict(self) -> list[str]:
        words = ["predict", self.table() if self._random.random() < 0.8 else self.recipe(), *self.calibration()]
        return words + (["--cluster", self.cluster()] if self._random.random() < 0.3 else []) + self.maybe("--format")

    def try_fit(self) -> list[str]:
        rows = self.table() if self._random.random() < 0.5 else self.store()
        return ["fit", rows, "-o", str(self._path(".toml")), *self.maybe("--cluster"), *self.maybe("--stack")]

    def try_report(self) -> list[str]:
        draw = self._random.random()
        plan: dict[str, object] = {"entries": [{"rank": 1}], "model": "m", "devices": 8}
        source = self.store() if draw < 0.4 else self.table() if draw < 0.7 else self.file(".json", plan)
        ending = self._random.choice([".html", ".csv", ".svgz", ".parquet", ""])
        return ["report", source, *(["-o", str(self._path(ending))] if self._random.random() < 0.7 else [])]

    def try_import(self) -> list[str]:
        log = (" hidden_size .... 64\n num_layers .... 2\n" + LINE.format(1) + LINE.format(2)).encode()
        document = b"# Notes\n\n| MBS | GBS | Sec/it | TFLOPs |\n|--|--|--|--|\n| 1 | 8 | 2.0 | 30 |\n"
        suffix, content = self._random.choice([(".log", log), (".md", document), (".csv", self._csv.encode())])
        words = [
            "import",
            self.file(suffix, content=content),
            "--into",
            str(self._path(".sqlite")),
            *self.maybe("--set"),
        ]
        if self._random.random() < 0.3:
            words += ["--profile", self.file(".toml", {"title": "Notes", "set": {"layers": 2}, "year": 2022})]
        return words + self.maybe("--as")

    def try_configuration(self) -> list[str]:
        script = b'A=(--num-layers 2 --hidden-size 64 --num-attention-heads 4)\ntorchrun x.py "${A[@]}" '
        script += b"--seq-length $((32*2)) "
        script += b"--vocab-size 512 --micro-batch-size ${M:-1} --pipeline-model-parallel-size 2 # one"
        titan = b'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 2\n'
        deep = json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}}).encode()
        kinds = [(".sh", script), (".toml", titan), (".json", deep), (".yaml", b"model: {num_layers: 2, bf16: true}\n")]
        suffix, content = self._random.choice(kinds)
        file = self.file(suffix, content=content)
        return ["import", "--config", file, "--cluster", self.cluster(), "--devices", "8", *self.maybe("--as")]

    def try_store(self) -> list[str]:
        verb = self._random.choice(["list", "show", "compare", "export", "merge"])
        rest = {"show": [self.word()], "compare": ["1", self.word()], "merge": [self.store()]}.get(verb, [])
        rest += ["-o", str(self._path(self._random.choice([".csv", ".txt"])))] if verb == "export" else []
        more = self.maybe("--where") if verb in ("list", "export") else []
        return ["store", self.store(), verb, *rest, *more]

    def try_run(self) -> list[str]:
        verb = self._random.choice(["bench", "tune", "train", "data"])
        layout = ["--layout", self._random.choice(["dp64,mbs4", "dp" + "9" * 5000])] if verb == "train" else []
        retry = self.maybe("--retry") if verb in ("bench", "tune") else []
        return [verb, self.recipe(), *layout, *retry, "--runs", str(self._folder / "runs")]

    def try_explore(self) -> list[str]:
        return ["explore", "--model", self.model(), "--cluster", self.cluster(), "--port", str(self._port)]

    def try_words(self) -> list[str]:
        return [self.word() for _ in range(self._random.randrange(1, 4))]

    def try_weights(self) -> list[str]:
        verb = self._random.choice(["sample", "convert"])
        source = str(self.special("")) if self._random.random() < 0.9 else self.word()
        return [verb, source] + (["-o", str(self._path(""))] if verb == "convert" else ["--tokens", "1"])


def toml(table: dict[str, object]) -> str:
    """The table as TOML, also where it is one that no writer of TOML takes."""
    lines = [f"{json.dumps(name)} = {_value(value)}\n" for name, value in table.items()]
    return "".join(lines)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


def complaints(count: int, seed: int, folder: Path) -> list[str]:
    """What is wrong with the answers to so many tries."""
    with taken_port() as port:
        tries = list(Tries(seed, folder, port).draw(count))
        reasons = [_soonest(tried, folder).complaint(tried) for tried in tries]
    return [reason for reason in reasons if reason]


def _soonest(tried: Try, folder: Path) -> Answer:
    """The answer to a try, the soonest of three where it is late: the same work takes longer beside other tests."""
    found = answer(tried, folder)
    for _ in range(2):
        if found.cpu_s > MOST_CPU_S:
            found = min(found, answer(tried, folder), key=lambda again: again.cpu_s)
    return found
