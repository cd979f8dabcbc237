"""Training through an engine from other people's trainers. None of them is a dependency: each
module imports the library it is named after."""
