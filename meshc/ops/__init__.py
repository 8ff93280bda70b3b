"""The operators of the `meshc::` namespace, one file a family."""
