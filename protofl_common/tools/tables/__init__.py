"""Tables: their files (`spec`), runs (`plan`), figures (`figure`) and text (`render`)."""
