"""The tables of the buffer in a database. A row of SLOTS is a `trivium.buffers.slots.Row`; GROUPS is the journal."""

from __future__ import annotations

import sqlalchemy as sa

TABLES = sa.MetaData()
RUNS = sa.Table(
    "trivium_runs",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("place", sa.Text, nullable=False, comment="machine and run directory, for people"),
)
"""The run that owns each name."""
BUFFERS = sa.Table(
    "trivium_buffers",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, nullable=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("change", sa.BigInteger, nullable=False),
    sa.Column("closed", sa.Boolean, nullable=False),
    # Until a vacuum PostgreSQL's indexes contain deleted rows; a search with a lower bound skips them.
    sa.Column("begin", sa.BigInteger, nullable=False, comment="no FINISHED row has a lower slot, or a lower arrival"),
    sa.Column("oldest", sa.BigInteger, nullable=False, comment="no FINISHED row is older"),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in ("trains", "next_slot", "arrivals", "given_up", "refused", "evicted", "called_off", "dropped")
    ),
)
"""One row per buffer, locked by every transaction that writes. `session` identifies the trainer that opened the buffer
last, `change` counts the changes, and the other numbers are `slot_machine.HEAD`."""
SLOTS = sa.Table(
    "trivium_slots",
    TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("slot", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("version", sa.BigInteger, comment="the one it was leased for"),
    # The columns from here to `dropped` describe the group.
    sa.Column("arrival", sa.BigInteger, comment="null where no group was put"),
    sa.Column("oldest", sa.BigInteger),
    sa.Column("newest", sa.BigInteger),
    sa.Column("taskset", sa.Text),
    sa.Column("task", sa.Text),
    sa.Column("dropped", sa.Boolean),
    sa.Column("consumed_at", sa.BigInteger, comment="the version that was trained on it"),
    # No operation reads more rows than it returns, for any number of rows. The state comes first, so a search by slot
    # alone can only use the primary key: PostgreSQL has no statistics of a new table, and would choose any index that
    # begins with the buffer.
    sa.Index("trivium_slots_by_slot", "state", "buffer", "slot"),
    sa.Index("trivium_slots_by_arrival", "state", "buffer", "arrival"),
    sa.Index("trivium_slots_by_age", "state", "buffer", "oldest"),
)
GROUPS = sa.Table(
    "trivium_groups",
    TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("slot", sa.BigInteger, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)
MEDIA = sa.Table(
    "trivium_media",
    TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
FAILED = sa.Table(
    "trivium_failed",
    TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("from_slot", sa.BigInteger, nullable=False),
)
"""The first slot of the failures that ended a run, until it is resumed."""
EXPLORERS = sa.Table(
    "trivium_explorers",
    TABLES,
    sa.Column("buffer", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("loaded", sa.BigInteger, nullable=False),
)
"""The version that each explorer has loaded."""
CALLS = sa.Table(
    "trivium_calls",
    TABLES,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("buffer", sa.Text, nullable=False, index=True),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
)
"""The last call of each caller with its result, for callers that lost the connection before the result came."""
