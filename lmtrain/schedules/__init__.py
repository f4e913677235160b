"""Pipeline schedules as pure-Python tables."""
