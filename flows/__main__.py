"""`python -m flows build-draft smollm2-135m --set training.lr=1e-4`: what the Makefile calls; see
flows/command.py.
"""

from flows.command import main

main()
