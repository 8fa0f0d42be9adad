"""From the user's files to the tensors of one optimizer step.

sources reads records, chat makes tokens and masks of them, packing fills rows, prepare caches, loader feeds.
"""
