"""The planners, one file each: how a training job is spread over a cluster. Files that begin with ``_`` hold what
several planners share."""
