"""A machine that lends capacity: starts shard workers, keeps them alive and reports them to the tracker."""
