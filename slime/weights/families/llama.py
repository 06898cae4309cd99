"""Llama 2, 3, 3.1, 3.2."""

from slime.weights.families.dense import ATTENTION, EMBEDDING_RULE, HEAD, MLP
from slime.weights.families.family import Family

LLAMA = Family(model_type="llama", rules=(EMBEDDING_RULE, *ATTENTION, *MLP, *HEAD))
