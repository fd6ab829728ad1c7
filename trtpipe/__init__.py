"""trtpipe: from a Hugging Face model to a measured Triton deployment, in one command.

pipeline/, engines/, triton_repo/ and configs/ here are links to the folders of that name at the root of the repository;
in an installed trtpipe they are folders.
"""

__version__ = "0.1.0"
