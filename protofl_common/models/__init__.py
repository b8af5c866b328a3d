"""Client models: a body x -> z in R^D and a head z -> logits (`build`); `groups` names the architectures."""
