"""The tables of the job store: schedulers, jobs and commits."""

from sqlalchemy import Column, Float, Integer, MetaData, Table, Text

TABLES = MetaData()

SCHEDULER = Table(
    "scheduler",
    TABLES,
    Column("generation", Integer, primary_key=True, autoincrement=False),
    Column("began", Float(53), nullable=False),
)

JOBS = Table(
    "jobs",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("steps", Integer, nullable=False),
    Column("epoch", Integer, nullable=False, default=0),
    Column("committed", Integer, nullable=False, default=0),
    Column("checkpoint", Text),
    Column("failures", Integer, nullable=False, default=0),
    Column("state", Text, nullable=False, default="active"),
    Column("error", Text),
    Column("finished_seconds", Float(53)),
)

COMMITS = Table(
    "commits",
    TABLES,
    Column("job", Text, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("first", Integer, nullable=False),
    Column("last", Integer, nullable=False),
)
