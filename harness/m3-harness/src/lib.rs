//! Both pipelines: from a case to a verdict, and from a recipe to a trained model.
