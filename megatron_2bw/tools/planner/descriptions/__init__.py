"""Descriptions of a model, a cluster, a profile and a plan: the ground floor, which
other rooms import."""
