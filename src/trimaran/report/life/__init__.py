"""The life of a training: what its folder says of loss, speed, checkpoints, faults, and where its time went."""
