"""Node keys, states and hops of sessions, the ledger; whole numbers that may need more than 32 bits get 64."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("nodes") as nodes:
        nodes.alter_column("lease_epoch", existing_type=sa.Integer(), type_=sa.BigInteger())
        nodes.alter_column("last_seen_unix_s", existing_type=sa.Float(), type_=sa.Double())
        nodes.add_column(sa.Column("public_key", sa.String()))
        nodes.add_column(sa.Column("machine", sa.String()))
    with op.batch_alter_table("models") as models:
        models.alter_column("first_seen_unix_s", existing_type=sa.Integer(), type_=sa.BigInteger())
    with op.batch_alter_table("artifacts") as artifacts:
        artifacts.alter_column("published_unix_s", existing_type=sa.Integer(), type_=sa.BigInteger())
    upgrade_sessions()
    create_session_hops()
    create_ledger()


def upgrade_sessions() -> None:
    with op.batch_alter_table("sessions") as sessions:
        for name in ("epoch", "opened_unix_s", "expires_unix_s", "closed_unix_s", "generated_tokens"):
            sessions.alter_column(name, existing_type=sa.Integer(), type_=sa.BigInteger())
        # Without nodes and layers they say too little to be kept as hops.
        sessions.drop_column("shard_ids")
        sessions.add_column(sa.Column("state", sa.String()))
    op.execute("UPDATE sessions SET state = CASE WHEN closed_unix_s IS NULL THEN 'open' ELSE 'closed' END")
    with op.batch_alter_table("sessions") as sessions:
        sessions.alter_column("state", existing_type=sa.String(), nullable=False)


def create_session_hops() -> None:
    op.create_table(
        "session_hops",
        sa.Column("session_id", sa.String(), sa.ForeignKey("sessions.session_id", ondelete="CASCADE"), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("hop_index", sa.Integer(), nullable=False),
        sa.Column("shard_id", sa.String(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("layer_start", sa.Integer(), nullable=False),
        sa.Column("layer_end", sa.Integer(), nullable=False),
        sa.Column("capacity_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "epoch", "hop_index"),
    )


def create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("hop_index", sa.Integer(), nullable=False),
        sa.Column("node_id", sa.String(), nullable=False),
        sa.Column("shard_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("artifact_digest", sa.String(), nullable=False),
        sa.Column("layer_start", sa.Integer(), nullable=False),
        sa.Column("layer_end", sa.Integer(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("decode_tokens", sa.BigInteger(), nullable=False),
        sa.Column("layer_tokens", sa.BigInteger(), nullable=False),
        sa.Column("bytes_in", sa.BigInteger(), nullable=False),
        sa.Column("bytes_out", sa.BigInteger(), nullable=False),
        sa.Column("compute_us", sa.BigInteger(), nullable=False),
        sa.Column("measured", sa.Boolean(), nullable=False),
        sa.Column("at_unix_s", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "epoch", "hop_index"),
    )
    op.create_index("ledger_by_time", "ledger", ["at_unix_s"])
    # Whatever a later version or a person at a prompt does by mistake: rows are only ever added.
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$"
        )
        op.execute(
            "CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger "
            "FOR EACH STATEMENT EXECUTE FUNCTION ledger_is_append_only()"
        )
    else:
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER ledger_no_{change.lower()} BEFORE {change} ON ledger "
                "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            )
