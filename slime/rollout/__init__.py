"""Production of samples: generation through the engines, rewards, filters, evaluation.

The one owner of the handles is :class:`slime.rollout.context.RolloutContext`.
"""
