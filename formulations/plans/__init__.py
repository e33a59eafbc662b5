"""The plan and its language: actions, stages, schedules, prices."""
