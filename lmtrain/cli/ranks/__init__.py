"""Commands that run as several processes: how they are started, refused and imported for."""
