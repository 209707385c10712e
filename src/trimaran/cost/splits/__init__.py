"""Stage splits as tables: what each pipeline rank holds, and the ways through its warm-up."""
