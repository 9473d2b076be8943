package nodecontroller

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
	"k8s.io/klog/v2"
)

// directEvents sends each event before it goes on: a command ends before a recorder that
// works in the background has sent anything.
type directEvents struct {
	ctx       context.Context // that of the command; the interface has no room for one
	client    kubernetes.Interface
	component string
}

var _ record.EventRecorder = &directEvents{}

// Event implements [record.EventRecorder]. An event that is not sent stops nothing.
func (d *directEvents) Event(obj runtime.Object, kind, reason, message string) {
	log := klog.FromContext(d.ctx)
	ref, err := reference.GetReference(scheme.Scheme, obj)
	if err != nil {
		log.Error(err, "An event cannot be sent", "reason", reason)
		return
	}
	namespace, now := ref.Namespace, metav1.Now()
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	_, err = d.client.CoreV1().Events(namespace).Create(d.ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, GenerateName: ref.Name + "."},
		InvolvedObject: *ref, Type: kind, Reason: reason, Message: message, Source: corev1.EventSource{Component: d.component},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}, metav1.CreateOptions{})
	if err != nil {
		log.Error(err, "An event was not sent", "reason", reason)
	}
}

// Eventf implements [record.EventRecorder].
func (d *directEvents) Eventf(obj runtime.Object, kind, reason, format string, args ...any) {
	d.Event(obj, kind, reason, fmt.Sprintf(format, args...))
}

// AnnotatedEventf implements [record.EventRecorder]; nothing here has annotations.
func (d *directEvents) AnnotatedEventf(obj runtime.Object, _ map[string]string, kind, reason, format string, args ...any) {
	d.Eventf(obj, kind, reason, format, args...)
}
