"""The tables as they were before there were steps.

A database from then has them, or some of them, and keeps them as they are.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    there = sa.inspect(op.get_bind()).get_table_names()
    for table, create in (
        ("nodes", create_nodes),
        ("shards", create_shards),
        ("models", create_models),
        ("artifacts", create_artifacts),
        ("sessions", create_sessions),
    ):
        if table not in there:
            create()


def create_nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.String(), primary_key=True),
        sa.Column("lease_epoch", sa.Integer(), nullable=False),
        sa.Column("instance", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("last_seen_unix_s", sa.Float(), nullable=False),
    )


def create_shards() -> None:
    op.create_table(
        "shards",
        sa.Column("shard_id", sa.String(), primary_key=True),
        sa.Column("node_id", sa.String(), sa.ForeignKey("nodes.node_id", ondelete="CASCADE"), nullable=False),
        sa.Column("shard", sa.JSON(), nullable=False),
        sa.Column("worker_key", sa.String(), nullable=False),
    )
    op.create_index("ix_shards_node_id", "shards", ["node_id"])


def create_models() -> None:
    op.create_table(
        "models",
        sa.Column("model", sa.String(), primary_key=True),
        sa.Column("artifact_digest", sa.String(), primary_key=True),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("n_layer", sa.Integer(), nullable=False),
        sa.Column("first_seen_unix_s", sa.Integer(), nullable=False),
    )


def create_artifacts() -> None:
    op.create_table(
        "artifacts",
        sa.Column("digest", sa.String(), primary_key=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("n_layer", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("n_files", sa.Integer(), nullable=False),
        sa.Column("info_hash", sa.String(), nullable=False),
        sa.Column("earlier_info_hashes", sa.JSON(), nullable=False),
        sa.Column("published_unix_s", sa.Integer(), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("torrent", sa.LargeBinary(), nullable=False),
    )


def create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), primary_key=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("artifact_digest", sa.String(), nullable=False),
        sa.Column("shard_ids", sa.JSON(), nullable=False),
        sa.Column("opened_unix_s", sa.Integer(), nullable=False),
        sa.Column("expires_unix_s", sa.Integer(), nullable=False),
        sa.Column("closed_unix_s", sa.Integer()),
        sa.Column("finish_cause", sa.String()),
        sa.Column("generated_tokens", sa.Integer()),
    )
    op.create_index("sessions_by_end", "sessions", ["closed_unix_s", "expires_unix_s"])
