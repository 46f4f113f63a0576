"""One trial's computation: data, model, training loop and what is measured in it. It knows no sweep, no search and no tracker."""
