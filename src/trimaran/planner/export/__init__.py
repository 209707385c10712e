"""Export: a layout as another trainer's flags or configuration, one file per trainer."""
