// Copyright The storage-controller Authors
// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/storage-controller/storage-controller/internal/kube"
)

// register adds the event handlers that update the state and fill the queue.
func (t *term) register() *kube.Registrations {
	registrations := &kube.Registrations{}
	add := registrations.Add
	if t.c.cfg.NodeDeployment {
		t.state.setSegment(segmentOf(t.c.deps.Topology))
	} else {
		add(t.c.nodes.Handle(kube.Handlers[metav1.Object]{
			Add:    func(n metav1.Object) { t.enqueue(t.state.nodeChanged(n.GetName(), n.GetLabels(), true)) },
			Update: func(_, n metav1.Object) { t.enqueue(t.state.nodeChanged(n.GetName(), n.GetLabels(), true)) },
			Delete: func(n metav1.Object) { t.enqueue(t.state.nodeChanged(n.GetName(), nil, false)) },
		}))
		add(t.c.csiNodes.Handle(kube.Handlers[*storagev1.CSINode]{
			Add:    func(n *storagev1.CSINode) { t.enqueue(t.state.csiNodeChanged(n.Name, n)) },
			Update: func(_, n *storagev1.CSINode) { t.enqueue(t.state.csiNodeChanged(n.Name, n)) },
			Delete: func(n *storagev1.CSINode) { t.enqueue(t.state.csiNodeChanged(n.Name, nil)) },
		}))
	}
	add(t.c.classes.Handle(kube.Handlers[*storagev1.StorageClass]{
		Add: func(class *storagev1.StorageClass) { t.enqueue(t.state.classChanged(class)) },
		Update: func(old, class *storagev1.StorageClass) {
			if old.ResourceVersion != class.ResourceVersion {
				t.enqueue(t.state.classChanged(class))
			}
		},
		Delete: func(class *storagev1.StorageClass) { t.enqueue(t.state.classDeleted(class.Name)) },
	}))
	add(t.c.published.Handle(kube.Handlers[*storagev1.CSIStorageCapacity]{
		Add: t.objectAdded,
		Update: func(old, obj *storagev1.CSIStorageCapacity) {
			if old.UID == obj.UID {
				return // class and topology are immutable; the next poll compares the capacity
			}
			t.objectDeleted(old)
			t.objectAdded(obj)
		},
		Delete: t.objectDeleted,
	}))
	return registrations
}

func (t *term) objectAdded(obj *storagev1.CSIStorageCapacity) { t.enqueue(t.state.objectAdded(obj)) }

func (t *term) objectDeleted(obj *storagev1.CSIStorageCapacity) {
	t.enqueue(t.state.objectDeleted(pairOf(obj), obj.Name, obj.UID))
}

func (t *term) enqueue(pairs []pair) {
	for _, p := range pairs {
		t.queue.Add(p)
	}
}
