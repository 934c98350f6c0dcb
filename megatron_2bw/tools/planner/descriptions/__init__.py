"""Descriptions of a model, a cluster and a plan: the ground floor, which
other rooms import."""
