// Package audit compares what the driver has with what the API server knows of it:
// volumes, where they are published, and objects that cannot be deleted. It finds, and
// changes nothing.
package audit
