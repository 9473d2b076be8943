package provisioner

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Reasons of events, as csi-provisioner has them.
const (
	reasonProvisioning = "Provisioning"
	reasonSucceeded    = "ProvisioningSucceeded"
	reasonFailed       = "ProvisioningFailed"
	reasonFailedDelete = "VolumeFailedDelete"
)

// event is what is told about an object.
type event struct {
	kind, reason, message string
}

func provisioningEvent(claim *corev1.PersistentVolumeClaim) event {
	return event{corev1.EventTypeNormal, reasonProvisioning, fmt.Sprintf("The driver is provisioning a volume for claim %s/%s", claim.Namespace, claim.Name)}
}

func populatorEvent(err error) event {
	return event{corev1.EventTypeNormal, reasonProvisioning, fmt.Sprintf("Not provisioned by the driver: %v", err)}
}

func succeededEvent(volume string) event {
	return event{corev1.EventTypeNormal, reasonSucceeded, "Successfully provisioned volume " + volume}
}

func failedEvent(class string, err error) event {
	return event{corev1.EventTypeWarning, reasonFailed, fmt.Sprintf("Provisioning a volume with StorageClass %q failed: %v", class, err)}
}

func infeasibleEvent(class string, delay fmt.Stringer, err error) event {
	return event{corev1.EventTypeWarning, reasonFailed, fmt.Sprintf(
		"Provisioning a volume with StorageClass %q failed: the request is infeasible for the driver, the next attempt is delayed by %v: %v", class, delay, err)}
}

func failedDeleteEvent(err error) event {
	return event{corev1.EventTypeWarning, reasonFailedDelete, err.Error()}
}
