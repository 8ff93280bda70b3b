"""Recipes, the plans with names: `meshc.plan.recipes`, under the name that users import."""

from meshc.plan.recipes import RECIPES, explain, resolve

__all__ = ["RECIPES", "explain", "resolve"]
