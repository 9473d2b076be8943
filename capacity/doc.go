// Package capacity publishes how much room a driver has, and where: for each topology
// segment in which the driver is registered and each StorageClass of it, one
// CSIStorageCapacity object that says what GetCapacity answered (KEP-1472; CSI spec,
// "GetCapacity"). The scheduler puts pods with unbound claims only where there is room.
//
// Everything goes by pairs of a class and a segment. An event says which pair may have
// changed; a sync of the pair looks at what there is, decides what is to be done about
// its objects, and asks the driver when the time has come.
package capacity
