"""Partitions and schedules of finite pipelines."""
