"""Features that never lie on disk all at once: `store.window_gb` bounds them, whatever the data's size.

In: a recipe with a window, responses. Out: a features artifact of what is kept, and for every leg of the
training a folder with exactly the samples that it reads.

The unit is a *fill*: a run of optimizer steps whose documents fit in the window together. A fill is extracted
(in parts of `responses.part_size`, as always), training runs a *leg* over its steps and leaves a checkpoint
after the last, the fill is deleted, the next begins. A document that several of its steps read is there once;
data that fits as a whole is one fill, extracted once for all epochs.

- Order. Lengths and supervised counts follow from the responses (`rows.py`), and the order of training from
  those and the seed: `Feed` says which documents a step reads before one feature exists (`fills.py`). So the
  batches are those of the run without a window, and so are the losses: to the bit where an engine's states
  do not depend on what it reads beside (the Hugging Face engine reads texts alone; vLLM's differ in the last
  bits, as they do between any two runs of it).
- Budget. The window counts what is kept and the fill; a fill is planned by the bytes of its documents before it
  is extracted, so nothing has to be watched while it is. A part on its way from the engine is in one file or
  in the other, never in both. Responses, checkpoints and the draft are no features and are not counted.
- Kept. Held-out rows (evaluated at the end) and those that choose the checkpoint (evaluated all along) are the
  features artifact, extracted once. It also names every row that was streamed, its fingerprint says that it
  is the streamed kind, the draft's lineage leads through it: it is whole, and no build without a window
  takes it for the features of everything.
- Drained. A fill is deleted when a checkpoint at its last step is on disk, so a killed trainer finds what it
  needs again. A killed extractor leaves whole parts, and the rest is extracted; a fill's folder is named by its
  steps and its documents, so it is gone on with only where it is what is needed.
- Device. Extraction and training take turns at it, each under the device lock, each in processes that are gone
  when the other begins: on one GPU, or on all, or on a CPU's cores, both would only share what one can fill.
  What it costs is a start of both a fill; running side by side would save that and need the target, the
  draft and vLLM's cache in memory together.
- Epochs. Where the data does not fit, every epoch extracts again. The plan says how much before the first fill,
  and each epoch says what it will take at the measured rate before it begins.
- Too small. A window that cannot hold what is kept and the largest step is an error before any extraction.

Answers are not captured on the way where a window is set: the order of answering is not that of training.
"""
