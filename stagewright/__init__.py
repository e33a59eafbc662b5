"""Stagewright: planner of distributed training whose every answer carries a certificate."""
