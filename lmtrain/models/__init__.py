"""Models that describe how they may be sharded and do not depend on processes."""
