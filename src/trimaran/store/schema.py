"""The store's schema: a list of migrations, applied in order and never edited once released."""

from __future__ import annotations

import sqlite3

# Written into the file's header, so that another program's database is never mistaken for a store.
APPLICATION_ID = 0x54524D4E  # "TRMN"

_FIRST = (
    """
    CREATE TABLE migration (
        version INTEGER PRIMARY KEY,
        applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
    )
    """,
    # One row is one run. Lists and mappings are JSON. `attempt` counts the runs of one trial.
    """
    CREATE TABLE measurement (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        attempt INTEGER NOT NULL DEFAULT 1,
        source TEXT, section TEXT, "table" TEXT, row TEXT,
        cluster TEXT, stack TEXT, system TEXT, hardware TEXT,
        nodes INTEGER, devices_per_node INTEGER, devices INTEGER,
        layers INTEGER NOT NULL, hidden INTEGER NOT NULL, ffn_hidden INTEGER,
        heads INTEGER NOT NULL, kv_heads INTEGER, seq_len INTEGER NOT NULL, vocab INTEGER NOT NULL,
        dp INTEGER, tp INTEGER NOT NULL, pp INTEGER NOT NULL, vpp INTEGER NOT NULL, cp INTEGER NOT NULL,
        mbs INTEGER NOT NULL, gbs INTEGER NOT NULL, zero_stage INTEGER NOT NULL, dp_kind TEXT NOT NULL,
        recompute TEXT NOT NULL, precision TEXT NOT NULL, optimizer TEXT NOT NULL, schedule TEXT NOT NULL,
        network_delay_ms REAL, network_gbps REAL, variant TEXT,
        mem_gib REAL, sec_per_it REAL, tflops REAL, tokens_per_s_per_gpu REAL,
        status TEXT NOT NULL, flops_formula TEXT, date TEXT, comparable_group TEXT,
        quality TEXT NOT NULL, notes TEXT,
        trial_key TEXT, layout_label TEXT, recipe TEXT, sec_per_it_spread REAL,
        step_times_s TEXT NOT NULL, losses TEXT NOT NULL, mem_gib_per_rank TEXT NOT NULL,
        predicted_sec_per_it REAL, predicted_mem_gib REAL, evidence TEXT,
        code_version TEXT, machine TEXT, libraries TEXT NOT NULL, environment TEXT NOT NULL,
        seed INTEGER, created_at TEXT, wall_s REAL,
        UNIQUE (trial_key, attempt)
    )
    """,
    # Who is measuring what right now. `started` tells a reused process id from the claimer's.
    """
    CREATE TABLE claim (
        trial_key TEXT PRIMARY KEY,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        started TEXT NOT NULL,
        expires_at REAL NOT NULL
    )
    """,
)

# A row's whole model, as its column `layout_label` is the whole layout.
_MODEL = ("ALTER TABLE measurement ADD COLUMN model TEXT",)

# What a log does not state is blank, the columns of a layout among it. SQLite drops no NOT NULL, so that the table is
# made anew; its columns stand in the order that the two migrations before have given it.
_BLANKS = (
    "ALTER TABLE measurement RENAME TO measurement_stated",
    """
    CREATE TABLE measurement (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        attempt INTEGER NOT NULL DEFAULT 1,
        source TEXT, section TEXT, "table" TEXT, row TEXT,
        cluster TEXT, stack TEXT, system TEXT, hardware TEXT,
        nodes INTEGER, devices_per_node INTEGER, devices INTEGER,
        layers INTEGER NOT NULL, hidden INTEGER NOT NULL, ffn_hidden INTEGER,
        heads INTEGER NOT NULL, kv_heads INTEGER, seq_len INTEGER NOT NULL, vocab INTEGER NOT NULL,
        dp INTEGER, tp INTEGER, pp INTEGER, vpp INTEGER, cp INTEGER,
        mbs INTEGER NOT NULL, gbs INTEGER NOT NULL, zero_stage INTEGER, dp_kind TEXT,
        recompute TEXT, precision TEXT, optimizer TEXT, schedule TEXT,
        network_delay_ms REAL, network_gbps REAL, variant TEXT,
        mem_gib REAL, sec_per_it REAL, tflops REAL, tokens_per_s_per_gpu REAL,
        status TEXT NOT NULL, flops_formula TEXT, date TEXT, comparable_group TEXT,
        quality TEXT NOT NULL, notes TEXT,
        trial_key TEXT, layout_label TEXT, recipe TEXT, sec_per_it_spread REAL,
        step_times_s TEXT NOT NULL, losses TEXT NOT NULL, mem_gib_per_rank TEXT NOT NULL,
        predicted_sec_per_it REAL, predicted_mem_gib REAL, evidence TEXT,
        code_version TEXT, machine TEXT, libraries TEXT NOT NULL, environment TEXT NOT NULL,
        seed INTEGER, created_at TEXT, wall_s REAL, model TEXT,
        UNIQUE (trial_key, attempt)
    )
    """,
    "INSERT INTO measurement SELECT * FROM measurement_stated",
    "DROP TABLE measurement_stated",
)

# What a table's columns say of a model that the first tables had no need to.
_TRAITS = (
    "ALTER TABLE measurement ADD COLUMN head_dim INTEGER",
    "ALTER TABLE measurement ADD COLUMN attention TEXT",
    "ALTER TABLE measurement ADD COLUMN mlp TEXT",
)

# Claims are files beside the store, which need no lock.
_NO_CLAIMS = ("DROP TABLE claim",)

# What other programs took of the cores while a trial ran.
_OTHERS = ("ALTER TABLE measurement ADD COLUMN others_share REAL",)

# Degrees that the first layouts had no need of, and the experts of a mixture.
_AXES = (
    *(f"ALTER TABLE measurement ADD COLUMN {name} INTEGER" for name in ("experts", "top_k", "shared_experts")),
    *(f"ALTER TABLE measurement ADD COLUMN {name} INTEGER" for name in ("moe_ffn_hidden", "dense_layers")),
    "ALTER TABLE measurement ADD COLUMN capacity_factor REAL",
    *(f"ALTER TABLE measurement ADD COLUMN {name} INTEGER" for name in ("shard", "ep", "etp")),
    *(f"ALTER TABLE measurement ADD COLUMN {name} TEXT" for name in ("cp_kind", "dispatcher")),
)

# Where what a rank holds lies, what hides exchanges of tokens, and how even these are.
_OFFLOAD = (
    *(f"ALTER TABLE measurement ADD COLUMN {name} TEXT" for name in ("ep_overlap", "offload")),
    "ALTER TABLE measurement ADD COLUMN expert_imbalance REAL",
)

# What changes the result: how replicas send each other gradients, and how rarely they agree.
_REPLICAS = (
    "ALTER TABLE measurement ADD COLUMN compression TEXT",
    "ALTER TABLE measurement ADD COLUMN local_steps INTEGER",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    _MODEL,
    _BLANKS,
    _TRAITS,
    _NO_CLAIMS,
    _OTHERS,
    _AXES,
    _OFFLOAD,
    _REPLICAS,
)
VERSION = len(MIGRATIONS)


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of an open file; 0 for an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an open file to VERSION, inside the caller's write transaction."""
    for version in range(version_of(connection) + 1, VERSION + 1):
        for statement in MIGRATIONS[version - 1]:
            connection.execute(statement)
        connection.execute("INSERT INTO migration (version) VALUES (?)", (version,))
        connection.execute(f"PRAGMA user_version = {version}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
