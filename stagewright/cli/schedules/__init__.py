"""Commands on schedules of stages and on published scheduling problems."""
