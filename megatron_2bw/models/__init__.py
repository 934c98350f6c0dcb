"""The inputs of a plan: model, cluster, profile; and the plan itself."""
