"""The pipeline's stages, one file each: a Prefect task around plain functions. Only this package joins the others."""
