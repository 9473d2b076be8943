package provisioner

import "github.com/storage-controller/storage-controller/internal/volumerules"

// sourceKey names the data source of a claim.
type sourceKey = volumerules.Source
