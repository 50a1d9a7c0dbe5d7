"""EAGLE-3 draft models in torch and nothing else: the model, training-time test, acceptance, decoding.

Dimension letters, the same everywhere: B documents, T tokens of a document, N training-time-test steps,
K draft length, H hidden size, V target vocabulary, D draft vocabulary.
"""
