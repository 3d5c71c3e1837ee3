"""pyscan inside the trainers and beside the dashboards people use; each module needs the library it is named after."""
